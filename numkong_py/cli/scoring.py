"""Commands that score: `score` and `search`, over files and over corpora."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..arrays import Collection
from ..corpus import Corpus
from ..corpus.search import threshold
from ..errors import InvalidArgument
from ..ops import maxsim, topk
from ..packed import PackedTensor, pack
from ..storage import write_aside
from .inputs import is_corpus, is_lines, read_any, read_id_lines, read_json_lines, read_lines

__all__ = ["print_score", "print_search", "run_score", "run_search"]

BLOCKS = 100  # steps of a progress bar
QUERIES_AT_A_TIME = 64  # of JSON lines that come in while answers go out


def _packed_documents(arguments: argparse.Namespace, queries: Any) -> PackedTensor:
    documents = read_any(arguments.documents, arguments.dtype)
    if isinstance(documents, PackedTensor):
        return documents
    return pack(documents, backend=queries.backend if isinstance(queries, PackedTensor) else None)


def _block(documents: PackedTensor) -> int:
    return max(1, -(-len(documents) // BLOCKS))


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ("metric", "reduction", "threads")}


# ------------------------------------------------------------------------------------- score


def run_score(arguments: argparse.Namespace) -> dict[str, Any]:
    """Score every query against every document of a file."""
    queries = read_any(arguments.queries, arguments.dtype)
    documents = _packed_documents(arguments, queries)
    block = _block(documents)
    parts = []
    with tqdm(total=len(documents), desc="scoring", unit="doc", disable=None) as bar:
        for start in range(0, max(1, len(documents)), block):
            parts.append(maxsim(queries, documents[start : start + block], **_options(arguments)))
            bar.update(len(documents[start : start + block]))
    scores = np.concatenate(parts, axis=-1)
    if arguments.output is not None:
        write_aside(arguments.output, lambda file: np.save(file, scores))
    return {
        "backend": documents.backend,
        "metric": arguments.metric,
        "reduction": arguments.reduction,
        "shape": list(scores.shape),
        "output": None if arguments.output is None else str(arguments.output),
        "scores": scores.tolist() if arguments.output is None else None,
    }


def print_score(facts: dict[str, Any]) -> None:
    """Show scores, one query a line."""
    if facts["scores"] is None:
        print(f"wrote scores {facts['shape']} to {facts['output']}")
        return
    for row in np.atleast_2d(np.array(facts["scores"])):
        print(" ".join(f"{score:.9g}" for score in row))


# ------------------------------------------------------------------------------------- search


def run_search(arguments: argparse.Namespace) -> Any:
    """The best documents of every query: one report, or with --lines one for every query as they come in."""
    target = _Target(arguments)
    if arguments.lines:
        return _answer_lines(target, arguments)
    if is_lines(arguments.queries):
        parts = list(read_lines(arguments.queries, target.dtype, sys.maxsize))
        if not parts:
            raise InvalidArgument(f"{arguments.queries}: no lines")
        queries, listed = parts[0].sets, [line.get("candidates") for line in parts[0].fields]
    else:
        queries, listed = read_any(arguments.queries, arguments.dtype), []
    return {**target.facts, "metric": arguments.metric, "hits": target.hits(queries, _candidates(arguments, listed))}


def _answer_lines(target: _Target, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """For every line with a query its fields and hits; candidates may come in the line."""
    if not is_lines(arguments.queries):
        queries = read_any(arguments.queries, arguments.dtype)
        for number, hits in enumerate(target.hits(queries, _candidates(arguments, []))):
            yield {"query": number, "hits": hits}
        return
    for sets, fields in read_lines(arguments.queries, target.dtype, QUERIES_AT_A_TIME):
        listed = _candidates(arguments, [line.pop("candidates", None) for line in fields])
        for line, hits in zip(fields, target.hits(sets, listed)):
            yield {**line, "hits": hits}


def _candidates(arguments: argparse.Namespace, listed: list[Any]) -> list[Any] | None:
    """Lists of candidates: of the option's file, else those that came with the queries, if they did."""
    if arguments.candidates is None:
        missing = sum(each is None for each in listed)
        if 0 < missing < len(listed):
            raise InvalidArgument(f'{arguments.queries}: {missing} of {len(listed)} lines have no "candidates"')
        return listed if listed and not missing else None
    if arguments.candidates.suffix == ".npy":
        return np.load(arguments.candidates, allow_pickle=False).tolist()
    found = []
    for where, line in read_json_lines(arguments.candidates):
        found.append(line.get("candidates") if isinstance(line, dict) else line)
        if not isinstance(found[-1], list):
            raise InvalidArgument(f'{where}: wanted a list of ids, or an object with "candidates"')
    return found


class _Target:
    """What is searched: a corpus, or the documents of a file."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._corpus: Corpus | None = None
        path: Path = arguments.documents
        if is_corpus(path):
            self._corpus = Corpus.open(path)
            self.dtype = self._corpus.dtype
            info = self._corpus.info()
            self._filters = {
                name: read_id_lines(given, info["ids"])
                for name in ("include", "exclude")
                if (given := getattr(arguments, name)) is not None
            }
            self.facts = {"corpus": str(path), "backends": info["backends"], "documents": len(self._corpus)}
            return
        for name in ("include", "exclude", "fields", "alignment"):
            if getattr(arguments, name):
                raise InvalidArgument(f"--{name}: {path} is a file, wanted a corpus; `append` makes one")
        self._documents = _packed_documents(arguments, None)
        self.dtype = self._documents.dtype
        self.facts = {"backend": self._documents.backend, "documents": len(self._documents)}

    def hits(self, queries: Collection | PackedTensor, candidates: list[Any] | None) -> list[list[dict[str, Any]]]:
        """For every query its hits, best first."""
        if self._corpus is None:
            return self._file_hits(queries, candidates)
        arguments = self._arguments
        scores, ids = self._corpus.topk(
            queries,
            arguments.k,
            candidates=candidates[0] if candidates and queries.single else candidates,
            missing="ignore" if arguments.ignore_missing else "raise",
            min_mean_score=arguments.min_mean_score,
            block=arguments.block,
            progress=None,
            **self._filters,
            **_options(arguments),
        )
        none = None if ids.dtype == object else -1
        found = [
            [{"id": id, "score": score} for id, score in zip(*row) if id != none]
            for row in zip(np.atleast_2d(ids).tolist(), np.atleast_2d(scores).tolist())
        ]
        self._describe(queries, found)
        return found

    def _describe(self, queries: Collection | PackedTensor, found: list[list[dict[str, Any]]]) -> None:
        """Add metadata and alignments to hits, if they are asked for."""
        for query, hits in enumerate(found):
            if self._arguments.fields:
                for hit, row in zip(hits, self._corpus.metadata.rows([hit["id"] for hit in hits])):
                    hit["fields"] = row
            if self._arguments.alignment:
                packed = queries if isinstance(queries, PackedTensor) else pack(queries)
                for hit in hits:
                    aligned = self._corpus.alignment(packed[query], hit["id"], metric=self._arguments.metric)
                    hit |= {"argmax": aligned.argmax.tolist(), "token_scores": aligned.token_scores.tolist()}

    def _file_hits(
        self, queries: Collection | PackedTensor, candidates: list[Any] | None
    ) -> list[list[dict[str, Any]]]:
        arguments, documents = self._arguments, self._documents
        table = None if candidates is None else _table(candidates)
        with tqdm(total=len(documents), desc="searching", unit="doc", disable=None) as bar:
            scores, places = topk(
                queries,
                documents,
                arguments.k,
                candidates=table,
                block=arguments.block or _block(documents),
                progress=bar.update,
                **_options(arguments),
            )
        scores, places = np.atleast_2d(scores), np.atleast_2d(places)
        kept = places >= 0
        if arguments.min_mean_score is not None:
            mean, descending = arguments.reduction == "mean", arguments.metric != "angular"
            lengths, least = np.asarray(queries.lengths), arguments.min_mean_score
            kept = threshold((scores, places), lengths, least, mean=mean, descending=descending)
        return [
            [{"document": place, "score": score} for place, score, keep in zip(*row) if keep]
            for row in zip(places.tolist(), scores.tolist(), kept.tolist())
        ]


def _table(lists: list[Any]) -> np.ndarray:
    """Candidates as a table, -1 where a list is shorter than the longest."""
    table = np.full((len(lists), max(map(len, lists), default=0)), -1)
    for row, each in zip(table, lists):
        row[: len(each)] = each
    return table


def print_search(facts: dict[str, Any]) -> None:
    """Show hits, query by query."""
    for number, hits in enumerate(facts["hits"]):
        print(f"query {number}")
        for rank, hit in enumerate(hits, start=1):
            name, key = ("document", hit["document"]) if "document" in hit else ("id", hit["id"])
            fields = json.dumps(hit["fields"], ensure_ascii=False) if "fields" in hit else ""
            print(f"{rank:>4}. {name} {key!s:<10} {hit['score']:.9g} {fields}".rstrip())
