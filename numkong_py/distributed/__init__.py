"""Search and packing on a Dask cluster, over a shared file system or an object store; the only importer of dask.

A shard's hits depend on the shard and the question alone, and merging them is exact, so who scores what, in which order
and how often does not show in the result.
"""

try:
    import distributed as _distributed  # noqa: F401
except ImportError as error:
    raise ImportError(f"{error}; numkong_py.distributed needs Dask: pip install 'numkong-py[distributed]'") from error

from .files import open_corpus
from .packing import pack
from .search import topk

__all__ = ["open_corpus", "pack", "topk"]
