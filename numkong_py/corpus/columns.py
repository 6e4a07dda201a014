"""Ids and metadata columns of documents: as users give them, and as tensors beside the vectors in a shard file.

Nothing here reads more of a mapped shard than it needs: an id is found by binary search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..arrays import read_indices
from ..errors import CorruptFile, InvalidArgument, ShapeMismatch, UnsupportedDtype

__all__ = [
    "KINDS",
    "Ids",
    "check_column_name",
    "column_tensors",
    "empty_ids",
    "first_repeated",
    "hashes_of",
    "id_tensors",
    "kind_of_ids",
    "read_column",
    "read_columns",
    "read_ids",
]

KINDS = {"int": np.int64, "float": np.float64, "bool": np.bool_, "str": object}
OFFSETS = "-offsets"  # ends the name of the tensor that says where each string of another one starts
NO_ID = -1  # what an int id cannot be: it says "none" in results and candidates


# ------------------------------------------------------------------------------------- strings


def _string_tensors(name: str, values: Sequence[str]) -> dict[str, np.ndarray]:
    """UTF-8 bytes side by side, and where each string starts."""
    try:
        encoded = [value.encode() for value in values]
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name}: a string that is no Unicode text: {error}") from error
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(each) for each in encoded], out=offsets[1:])
    return {name: np.frombuffer(b"".join(encoded), np.uint8), f"{name}{OFFSETS}": offsets}


def _string_at(data: np.ndarray, offsets: np.ndarray, position: int) -> str:
    start, stop = offsets[position : position + 2].tolist()
    if not 0 <= start <= stop <= len(data):
        raise CorruptFile("offsets of strings fall or leave their bytes")
    try:
        return data[start:stop].tobytes().decode()
    except UnicodeDecodeError as error:
        raise CorruptFile(f"a string cannot be read: {error}") from error


def _all_strings(data: np.ndarray, offsets: np.ndarray) -> list[str]:
    edges = offsets.tolist()
    if edges[0] != 0 or edges[-1] != len(data) or edges != sorted(edges):
        raise CorruptFile("offsets of strings fall or leave their bytes")
    text = data.tobytes()
    try:
        return [text[start:stop].decode() for start, stop in pairwise(edges)]
    except UnicodeDecodeError as error:
        raise CorruptFile(f"a string cannot be read: {error}") from error


def hashes_of(ids: np.ndarray) -> np.ndarray:
    """What ids are looked up by: themselves, or hashes of str, uint64."""
    if ids.dtype != object:
        return ids
    from xxhash import xxh3_64_intdigest  # here: corpora of int ids need none

    return np.array([xxh3_64_intdigest(each.encode("utf-8", "surrogatepass")) for each in ids], np.uint64)


# ------------------------------------------------------------------------------------- ids


def empty_ids(kind: str | None) -> np.ndarray:
    """No ids, of a kind."""
    return np.zeros(0, object if kind == "str" else np.int64)


def kind_of_ids(ids: np.ndarray) -> str:
    """The kind of ids that `read_ids` gave back: ``"int"`` or ``"str"``."""
    return "str" if ids.dtype == object else "int"


def read_ids(ids: Any, argument: str, kind: str | None) -> np.ndarray:
    """Ids as a user gave them: int64 [count], or str in an object array [count].

    Raises
    ------
    UnsupportedDtype
        They are neither integers nor strings, or not of the corpus's kind.
    ShapeMismatch, InvalidArgument
    """
    if isinstance(ids, (str, int, np.integer)) and not isinstance(ids, bool):
        ids = [ids]
    if isinstance(ids, (set, frozenset, range)) or not hasattr(ids, "__len__"):
        ids = list(ids)
    if len(ids) == 0:
        return empty_ids(kind)
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "UTO":
        ids = ids.tolist()
    if isinstance(ids, (list, tuple)) and any(isinstance(each, str) for each in ids):
        found = _read_strings(ids, argument)
    else:
        found = _read_integers(ids, argument)
    if kind is not None and kind_of_ids(found) != kind:
        raise UnsupportedDtype(f"{argument}: of kind {kind_of_ids(found)!r}, and this corpus has {kind!r} ids")
    return found


def _read_strings(ids: Sequence[Any], argument: str) -> np.ndarray:
    other = next((each for each in ids if not isinstance(each, str)), None)
    if other is not None:
        raise UnsupportedDtype(f"{argument}: str and {type(other).__name__} together, wanted all int or all str")
    found = np.empty(len(ids), object)
    found[:] = ids
    return found


def _read_integers(ids: Any, argument: str) -> np.ndarray:
    try:
        found = read_indices(ids, argument)
    except UnsupportedDtype as error:
        raise UnsupportedDtype(f"{argument}: wanted int (64 bits, signed) or str: {error}") from error
    if found.ndim != 1:
        raise ShapeMismatch(f"{argument}: shape {found.shape}, wanted one dimension")
    if getattr(ids, "dtype", None) == np.uint64 and (found < 0).any():
        raise UnsupportedDtype(f"{argument}: beyond 2^63 - 1, wanted 64 bits, signed")
    if (found == NO_ID).any():
        raise InvalidArgument(f"{argument}: {NO_ID} means no document; give it another id")
    return found


def first_repeated(ids: np.ndarray) -> Any:
    """An id that is there twice, or None."""
    if ids.dtype == object:
        seen: set[str] = set()
        return next((each for each in ids if each in seen or seen.add(each)), None)
    ordered = np.sort(ids)
    repeated = np.flatnonzero(ordered[1:] == ordered[:-1])
    return int(ordered[repeated[0]]) if len(repeated) else None


def id_tensors(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Tensors that keep ids and find them: int ids need an order only where they do not rise."""
    if ids.dtype == object:
        keys = hashes_of(ids)
        order = np.argsort(keys, kind="stable")
        return {**_string_tensors("ids", ids), "ids-keys": keys[order], "ids-order": order.astype(np.int64)}
    if (ids[1:] > ids[:-1]).all():
        return {"ids": ids}
    return {"ids": ids, "ids-order": np.argsort(ids, kind="stable").astype(np.int64)}


class Ids:
    """Ids of a shard's documents over its mapped tensors.

    Examples
    --------
    >>> ids = Ids(id_tensors(np.array([7, 3, 9])), 3)
    >>> ids.find(np.array([9, 4, 3]), np.array([9, 4, 3])), ids.at(np.array([0]))
    (array([ 2, -1,  1]), array([7]))
    """

    def __init__(self, tensors: Mapping[str, np.ndarray], count: int) -> None:
        self.count = count
        self.values = tensors.get("ids")
        self.offsets = tensors.get(f"ids{OFFSETS}")
        self.keys = tensors.get("ids-keys")
        self.order = tensors.get("ids-order")
        lengths = {count}
        lengths |= {len(each) for each in (self.keys, self.order) if each is not None}
        lengths.add(-1 if self.values is None else len(self.values) if self.offsets is None else len(self.offsets) - 1)
        if lengths != {count} or (self.offsets is None) != (self.keys is None):
            raise CorruptFile("its ids are not as many as its documents")

    def all(self) -> np.ndarray:
        """All ids, in memory."""
        if self.offsets is None:
            return np.array(self.values)
        return _read_strings(_all_strings(self.values, self.offsets), "ids") if self.count else empty_ids("str")

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Ids of documents by their place in the shard."""
        if self.offsets is None:
            return self.values[positions]
        found = np.empty(len(positions), object)
        found[:] = [_string_at(self.values, self.offsets, position) for position in positions.tolist()]
        return found

    def find(self, wanted: np.ndarray, hashes: np.ndarray) -> np.ndarray:
        """Places in the shard of ids with their `hashes_of`, int64, -1 where it has none."""
        found = np.full(len(wanted), -1)
        if self.count == 0 or len(wanted) == 0:
            return found
        keys = self.values if self.offsets is None else self.keys
        try:
            places = np.searchsorted(keys, hashes, sorter=self.order if self.offsets is None else None)
            places = np.minimum(places, self.count - 1)
            positions = places if self.order is None else self.order[places]
            if self.offsets is None:
                return np.where(keys[positions] == hashes, positions, -1)
            for index in np.flatnonzero(keys[places] == hashes):
                found[index] = self._find_string(wanted[index], int(places[index]), hashes[index])
        except (ValueError, IndexError) as error:
            raise CorruptFile(f"the order of its ids leaves them ({error})") from error
        return found

    def _find_string(self, wanted: str, place: int, key: np.uint64) -> int:
        """Look at all strings of one hash."""
        while place < self.count and self.keys[place] == key:
            position = int(self.order[place])
            if not 0 <= position < self.count:
                raise IndexError(position)
            if _string_at(self.values, self.offsets, position) == wanted:
                return position
            place += 1
        return -1


# ------------------------------------------------------------------------------------- metadata


def _kind_of_values(values: Sequence[Any], name: str) -> str:
    kinds = {_kind_of_value(value, name) for value in values if value is not None}
    if kinds <= {"int", "float"} and kinds:
        return "float" if "float" in kinds else "int"
    if len(kinds) != 1:
        raise UnsupportedDtype(
            f"metadata[{name!r}]: {' and '.join(sorted(kinds)) or 'only None'}, wanted one of int, float, bool, str; "
            "pass columns= to nk.Corpus.create to say which"
        )
    return kinds.pop()


def _kind_of_value(value: Any, name: str) -> str:
    for kind, types in (("bool", (bool, np.bool_)), ("int", (int, np.integer)), ("float", (float, np.floating))):
        if isinstance(value, types):
            return kind
    if isinstance(value, str):
        return "str"
    raise UnsupportedDtype(f"metadata[{name!r}]: a {type(value).__name__}, wanted int, float, bool, str or None")


def _as_rows_of_columns(metadata: Any, count: int) -> dict[str, list[Any]]:
    """Columns as lists, from a mapping of columns or a sequence of mappings, one for every document."""
    if isinstance(metadata, Mapping):
        return {
            name: values.tolist() if hasattr(values, "tolist") else list(values) for name, values in metadata.items()
        }
    rows = list(metadata)
    if not all(isinstance(row, Mapping) for row in rows):
        raise UnsupportedDtype("metadata: wanted {column: values}, or one mapping for every document")
    if len(rows) != count:
        raise ShapeMismatch(f"metadata: {len(rows)} rows for {count} documents")
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def check_column_name(name: Any, argument: str) -> None:
    """Raise on what cannot name a column: its tensors would be those of another column.

    Raises
    ------
    InvalidArgument
    """
    if not isinstance(name, str) or not name or name.endswith(OFFSETS):
        raise InvalidArgument(f"{argument}: column {name!r}, wanted a name that does not end with {OFFSETS!r}")


def read_columns(metadata: Any, count: int, kinds: Mapping[str, str]) -> dict[str, tuple[str, list[Any]]]:
    """Metadata as a user gave it: kind and values, None where there is none, of every column.

    Raises
    ------
    UnsupportedDtype, ShapeMismatch
    """
    columns = {}
    for name, values in _as_rows_of_columns(metadata, count).items():
        check_column_name(name, "metadata")
        if len(values) != count:
            raise ShapeMismatch(f"metadata[{name!r}]: {len(values)} values for {count} documents")
        wanted = kinds.get(name)
        if all(value is None for value in values):
            if wanted is not None:
                columns[name] = (wanted, values)
            continue
        found = _kind_of_values(values, name)
        if wanted not in (None, found) and (wanted, found) != ("float", "int"):
            raise UnsupportedDtype(f"metadata[{name!r}]: of kind {found!r}, and the column is of kind {wanted!r}")
        columns[name] = (wanted or found, values)
    return columns


def column_tensors(name: str, kind: str, values: Sequence[Any]) -> dict[str, np.ndarray]:
    """Tensors that keep a column, and which of its values are there unless all are.

    Raises
    ------
    UnsupportedDtype
        An integer has more than 64 bits.
    """
    valid = np.array([value is not None for value in values], bool)
    filled = [("" if kind == "str" else 0) if value is None else value for value in values]
    tensors = {} if valid.all() else {f"column-valid:{name}": valid}
    if kind == "str":
        return tensors | _string_tensors(f"column:{name}", filled)
    try:
        return tensors | {f"column:{name}": np.array(filled, KINDS[kind])}
    except OverflowError as error:
        raise UnsupportedDtype(f"metadata[{name!r}]: {error}; wanted 64 bits, signed") from error


def read_column(
    tensors: Mapping[str, np.ndarray], name: str, kind: str, positions: np.ndarray, count: int
) -> np.ndarray:
    """Values of a column at places of a shard of so many documents; None in an object array where some are missing."""
    data, valid = tensors.get(f"column:{name}"), tensors.get(f"column-valid:{name}")
    if data is None:
        return np.full(len(positions), None, object)
    offsets = tensors.get(f"column:{name}{OFFSETS}")
    if len(data if offsets is None else offsets[1:]) != count or (valid is not None and len(valid) != count):
        raise CorruptFile(f"its column {name!r} is not as long as its documents are many")
    if kind == "str":
        values = np.empty(len(positions), object)
        values[:] = [_string_at(data, offsets, position) for position in positions.tolist()]
    else:
        values = data[positions]
    if valid is None or valid[positions].all():
        return values
    return np.where(valid[positions], values.astype(object), None)
