"""Corpora that outlive the process: a folder of packed shards with ids, metadata, deletion and exact search."""

from .corpus import Alignment, Corpus, Explanation
from .search import Queries, Selection, empty_hits, merge, shard_topk
from .shards import Shard

__all__ = ["Alignment", "Corpus", "Explanation", "Queries", "Selection", "Shard", "empty_hits", "merge", "shard_topk"]
