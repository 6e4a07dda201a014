"""What commands read: token vectors in files, folders and JSON lines, and ids."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from tqdm import tqdm

from ..arrays import Collection, collection
from ..corpus.manifest import MANIFEST
from ..dtypes import NUMPY_DTYPES
from ..errors import InvalidArgument, ShapeMismatch
from ..interop import SUFFIXES, read_tokens
from ..packed import PackedTensor, open_file
from ..storage import is_packed, read

__all__ = [
    "Documents",
    "Lines",
    "files_in",
    "is_corpus",
    "is_lines",
    "read_any",
    "read_documents",
    "read_id_lines",
    "read_json_lines",
    "read_lines",
    "read_sets",
]

STANDARD = Path("-")  # standard input
LINES = (".jsonl", ".ndjson")


class Documents(NamedTuple):
    """Token sets of one file or some lines, with their ids and metadata if they have them."""

    sets: Collection
    ids: list[Any] | None
    metadata: list[dict[str, Any]] | None


class Lines(NamedTuple):
    """Token sets of some JSON lines, with the other fields of each."""

    sets: Collection
    fields: list[dict[str, Any]]


def is_corpus(path: Path) -> bool:
    """Whether a path is the folder of a corpus."""
    return (path / MANIFEST).is_file()


def is_lines(path: Path) -> bool:
    """Whether a path is JSON lines: standard input, or a file named so."""
    return path == STANDARD or path.suffix in LINES


# ------------------------------------------------------------------------------------- files


def _number(path: Path) -> list[Any]:
    """Sorting key that puts page2 before page10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"([0-9]+)", path.name) if part]


def files_in(path: Path) -> list[Path]:
    """A file itself; of a folder all files of token vectors, by name, numbers in names by value.

    Raises
    ------
    InvalidArgument
        A folder has none.
    """
    if not path.is_dir():
        return [path]
    found = sorted((each for each in path.iterdir() if each.is_file() and _has_tokens(each)), key=_number)
    if not found:
        raise InvalidArgument(f"{path}: a folder without {', '.join(SUFFIXES)} or packed files")
    return found


def _has_tokens(path: Path) -> bool:
    return not path.name.startswith(".") and (path.suffix in SUFFIXES or is_packed(path))


def read_sets(path: Path, dtype: str | None) -> Collection:
    """Token sets of one file of arrays, or of a packed file, without a copy of the latter."""
    if is_packed(path):
        return read(path).collection()
    with tqdm(desc="reading", unit="array", disable=None) as bar:
        return read_tokens(path, dtype=dtype, progress=bar.update).sets


def read_any(path: Path, dtype: str | None) -> PackedTensor | Collection:
    """A packed file as it lies, or the token sets of any other file or of JSON lines."""
    if is_lines(path):
        parts = list(read_lines(path, dtype or "f32", sys.maxsize))
        if not parts:
            raise InvalidArgument(f"{path}: no lines")
        return parts[0].sets
    return open_file(path) if is_packed(path) else read_sets(path, dtype)


def read_documents(path: Path, dtype: str | None, *, named: bool) -> Documents:
    """Token sets of one file; if asked for, a set that is alone in its file and has no id is called like the file."""
    if is_packed(path):
        return Documents(read(path).collection(), None, None)
    tokens = read_tokens(path, dtype=dtype)
    ids = [path.stem] if named and tokens.ids is None and tokens.sets.single else tokens.ids
    return Documents(tokens.sets, ids, None)


# ------------------------------------------------------------------------------------- lines


@contextmanager
def _text(path: Path) -> Iterator[TextIO]:
    if path == STANDARD:
        yield sys.stdin
        return
    with path.open(encoding="utf-8") as file:
        yield file


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Every line that is not blank, with where it is.

    Raises
    ------
    InvalidArgument
        A line is not JSON.
    """
    with _text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line)
            except ValueError as error:
                raise InvalidArgument(f"{where}: no JSON ({error})") from error


def read_lines(path: Path, dtype: str, count: int) -> Iterator[Lines]:
    """Token sets from JSON lines ``{"vectors": [[...], ...], ...}``, so many at a time.

    Raises
    ------
    InvalidArgument, ShapeMismatch
    """
    arrays: list[np.ndarray] = []
    fields: list[dict[str, Any]] = []
    for where, line in read_json_lines(path):
        if not isinstance(line, dict) or "vectors" not in line:
            raise InvalidArgument(f'{where}: wanted an object with "vectors"')
        arrays.append(_vectors(line.pop("vectors"), dtype, where))
        fields.append(line)
        if len(arrays) == count:
            yield Lines(_as_sets(arrays, path), fields)
            arrays, fields = [], []
    if arrays:
        yield Lines(_as_sets(arrays, path), fields)


def _vectors(rows: Any, dtype: str, where: str) -> np.ndarray:
    try:
        array = np.array(rows, np.float32).astype(NUMPY_DTYPES[dtype])
    except (TypeError, ValueError, OverflowError) as error:
        raise ShapeMismatch(f"{where}: vectors: wanted lists of as many numbers each ({error})") from error
    if array.ndim != 2 and array.size:
        raise ShapeMismatch(f"{where}: vectors: shape {array.shape}, wanted [tokens, depth]")
    return array


def _as_sets(arrays: list[np.ndarray], path: Path) -> Collection:
    """One collection; a set without vectors has the depth of the others."""
    depth = max((array.shape[1] for array in arrays if array.ndim == 2), default=0)
    if depth == 0:
        raise ShapeMismatch(f"{path}: no set has vectors, so their depth is not known")
    return collection([array if array.ndim == 2 else array.reshape(0, depth) for array in arrays])


def read_id_lines(path: Path, kind: str | None) -> list[Any]:
    """Ids, one a line; numbers if the corpus has numbers, or if it has none yet and all of them are.

    Raises
    ------
    InvalidArgument
        A line is no number, and the corpus has those.
    """
    with _text(path) as file:
        return as_ids([line.rstrip("\r\n") for line in file if line.strip()], kind)


def as_ids(texts: Iterable[str], kind: str | None) -> list[Any]:
    """Ids from text, of the corpus's kind."""
    texts = list(texts)
    if kind == "str":
        return texts
    try:
        numbers = [int(text) for text in texts]
    except ValueError as error:
        if kind is None:
            return texts
        raise InvalidArgument(f"ids: {error}, and this corpus has numbers for ids") from error
    return numbers if kind == "int" or list(map(str, numbers)) == texts else texts
