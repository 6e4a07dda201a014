"""Commands about files and corpora as a whole: `pack`, `inspect`, `verify`, `export`, `append`, `delete`, `compact`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..corpus import Corpus
from ..corpus.writer import as_collection, join, live_documents
from ..errors import InvalidArgument
from ..interop import write_tokens
from ..packed import open_file, pack
from ..storage import Stored, read
from .inputs import (
    Documents,
    as_ids,
    files_in,
    is_corpus,
    is_lines,
    read_documents,
    read_id_lines,
    read_json_lines,
    read_lines,
    read_sets,
)

__all__ = [
    "print_facts",
    "run_append",
    "run_compact",
    "run_delete",
    "run_export",
    "run_inspect",
    "run_pack",
    "run_verify",
]

LINES_AT_A_TIME = 64


def print_facts(facts: dict[str, Any]) -> None:
    """Show names and values, one a line."""
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


# ------------------------------------------------------------------------------------- packed files


def _facts(stored: Stored) -> dict[str, Any]:
    lengths = np.diff(stored.offsets)
    return {
        "documents": len(lengths),
        "tokens": int(stored.offsets[-1]),
        "longest": int(lengths.max(initial=0)),
        "empty": int((lengths == 0).sum()),
        "depth": stored.originals.shape[1],
        "dtype": stored.dtype,
        "precision": stored.coding.precision,
        "backend": stored.row,
        "device": "cpu",
        "available": stored.unavailable is None,
        "bytes": stored.buffer.nbytes,
        "bytes_per_token": round(stored.buffer.nbytes / max(1, int(stored.offsets[-1])), 1),
    }


def run_pack(arguments: argparse.Namespace) -> dict[str, Any]:
    """Pack a file, or all files of a folder one after another, into one file."""
    paths = files_in(arguments.input)
    if arguments.input.is_dir():
        parts = [read_sets(path, arguments.dtype) for path in tqdm(paths, desc="reading", unit="file", disable=None)]
        found = join([as_collection(part, parts[0].depth, parts[0].dtype) for part in parts])
    else:
        found = read_sets(arguments.input, arguments.dtype)
    started = time.perf_counter()
    options = {name: getattr(arguments, name) for name in ("precision", "normalize", "backend", "check_finite")}
    packed = pack(found, **options)
    seconds = time.perf_counter() - started
    packed.save(arguments.output)
    return {"output": str(arguments.output), **_facts(read(arguments.output)), "pack_seconds": round(seconds, 6)}


def run_inspect(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a packed file or a corpus holds."""
    if is_corpus(arguments.input):
        return {"input": str(arguments.input), **Corpus.open(arguments.input).info()}
    return {"input": str(arguments.input), **_facts(read(arguments.input))}


def run_verify(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check a packed file or a corpus."""
    verify = "full" if arguments.full else "header"
    started = time.perf_counter()
    if is_corpus(arguments.input):
        corpus = Corpus.open(arguments.input, verify=verify)
        for shard in corpus.shards:
            shard.file.stored()
        facts = corpus.info()
    else:
        with tqdm(desc="verifying", unit="B", unit_scale=True, disable=None) as bar:
            facts = _facts(read(arguments.input, verify=verify, progress=bar.update))
    seconds = time.perf_counter() - started
    return {"input": str(arguments.input), **facts, "verified": verify, "seconds": round(seconds, 6)}


def run_export(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the vectors of a packed file, or of a corpus with its ids, to a file that other programs read."""
    ids = None
    if is_corpus(arguments.input):
        corpus = Corpus.open(arguments.input)
        if len(corpus) == 0:
            raise InvalidArgument(f"{arguments.input}: no documents")
        packed, ids = pack(join([live_documents(shard) for shard in corpus.shards])), corpus.ids.tolist()
    else:
        packed = open_file(arguments.input)
    with tqdm(total=packed.tokens, desc="exporting", unit="token", disable=None) as bar:
        write_tokens(packed, arguments.output, ids=ids, as_list=arguments.as_list, progress=bar.update)
    return {"input": str(arguments.input), "output": str(arguments.output), "documents": len(packed)}


# ------------------------------------------------------------------------------------- corpora


def run_append(arguments: argparse.Namespace) -> dict[str, Any]:
    """Add documents of files, folders or JSON lines to a corpus, which is created if there is none."""
    created = not is_corpus(arguments.corpus)
    source = _documents(arguments, None if created else Corpus.open(arguments.corpus).dtype)
    first = next(source, None)
    if first is None:
        raise InvalidArgument("input: no documents")
    if created:
        Corpus.create(arguments.corpus, first.sets.depth, first.sets.dtype)
    corpus = Corpus.open(arguments.corpus, wait=arguments.wait)
    stream = _Stream(first, source)
    ids: Any = stream.ids if first.ids is not None else None
    if arguments.ids is not None:
        ids = read_id_lines(arguments.ids, corpus.info()["ids"])
    metadata: Any = stream.metadata if first.metadata is not None else None
    if arguments.metadata is not None:
        metadata = (row for _, row in read_json_lines(arguments.metadata))
    added = corpus.append(stream.sets, ids, metadata, normalize=arguments.normalize)
    return {"corpus": str(arguments.corpus), "created": created, "appended": len(added), **corpus.info()}


def _documents(arguments: argparse.Namespace, dtype: str | None) -> Iterator[Documents]:
    """Documents of all inputs, file by file."""
    for given in arguments.input:
        if is_lines(given):
            yield from _line_documents(given, arguments.dtype or dtype or "f32")
            continue
        for path in files_in(given):
            yield read_documents(path, arguments.dtype, named=given.is_dir())


def _line_documents(path: Path, dtype: str) -> Iterator[Documents]:
    """Documents of JSON lines: fields beside "vectors" and "id" are metadata."""
    for sets, fields in read_lines(path, dtype, LINES_AT_A_TIME):
        ids = [line.pop("id", None) for line in fields]
        yield Documents(sets, None if None in ids else ids, fields if any(fields) else None)


class _Stream:
    """Documents as `Corpus.append` takes them: sets, and with each of them its ids and metadata."""

    def __init__(self, first: Documents, others: Iterator[Documents]) -> None:
        self._documents = (each for part in ((first,), others) for each in part)
        self._named = first.ids is not None
        self._ids: list[Any] = []
        self._metadata: list[dict[str, Any]] = []

    @property
    def sets(self) -> Iterator[Any]:
        for sets, ids, metadata in self._documents:
            if (ids is not None) != self._named:
                raise InvalidArgument("input: some documents have ids and others have none; pass --ids for all of them")
            self._ids += ids or []
            self._metadata += metadata or [{} for _ in range(len(sets))]
            yield sets

    @property
    def ids(self) -> Iterator[Any]:
        """Those of the sets that were taken; more come with the next ones."""
        while self._ids:
            yield self._ids.pop(0)

    @property
    def metadata(self) -> Iterator[dict[str, Any]]:
        while self._metadata:
            yield self._metadata.pop(0)


def run_delete(arguments: argparse.Namespace) -> dict[str, Any]:
    """Remove documents from a corpus by id."""
    corpus = Corpus.open(arguments.corpus, wait=arguments.wait)
    kind = corpus.info()["ids"]
    ids = as_ids(arguments.id, kind)
    if arguments.ids is not None:
        ids += read_id_lines(arguments.ids, kind)
    deleted = corpus.delete(ids, missing="ignore" if arguments.ignore_missing else "raise")
    return {"corpus": str(arguments.corpus), "deleted_now": deleted, **corpus.info()}


def run_compact(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rewrite what is not as dense as it could be."""
    corpus = Corpus.open(arguments.corpus, wait=arguments.wait)
    saved = corpus.compact()
    return {"corpus": str(arguments.corpus), "bytes_saved": saved, **corpus.info()}
