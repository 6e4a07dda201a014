"""The manifest: one small JSON file, replaced whole, that says which files a corpus consists of.

A reader that has read it has a snapshot: the files that it names never change. Its hash covers all of it, and it holds
the hash of every other file's header, so damage anywhere is seen when the place is read.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..dtypes import SCORED
from ..errors import CorruptFile
from ..storage import digest, write_aside

__all__ = ["MANIFEST", "Manifest", "ShardEntry", "TombstonesEntry", "read_manifest", "write_manifest"]

MANIFEST = "manifest.json"
MARK = "numkong_py_corpus"  # the key that tells a manifest; its value is the format version
VERSION = 1
HASH = "xxh3_64"


class ShardEntry(NamedTuple):
    """A shard file as the manifest names it."""

    file: str
    head: str  # hash of its container's header, which holds the hashes of all that it contains
    bytes: int
    documents: int
    tokens: int
    row: str
    least_id: int | None  # of int ids, to pass over shards that cannot have one
    most_id: int | None


class TombstonesEntry(NamedTuple):
    """The file that holds the places of deleted documents."""

    file: str
    hash: str
    bytes: int
    documents: int


@dataclass(frozen=True)
class Manifest:
    """What a corpus consists of at one moment.

    Attributes
    ----------
    depth, dtype
        Of every document.
    shard_bytes : int
        Size that shard files are kept to.
    grace : float
        Seconds that files stay after they were replaced, for readers that open them by name.
    generation : int
        Counts the manifests of this corpus.
    ids : {"int", "str"} or None
        Kind of the ids; None until the first document.
    next_id : int
        The id that a document gets that comes without one.
    columns : dict
        Kind of every metadata column, by name.
    shards : tuple of ShardEntry
        In the order of their documents.
    tombstones : TombstonesEntry or None
    """

    depth: int
    dtype: str
    shard_bytes: int
    grace: float = 0.0
    generation: int = 0
    ids: str | None = None
    next_id: int = 0
    columns: dict[str, str] = field(default_factory=dict)
    shards: tuple[ShardEntry, ...] = ()
    tombstones: TombstonesEntry | None = None

    @property
    def files(self) -> set[str]:
        """Names of all files beside the manifest."""
        named = [*self.shards, *([self.tombstones] if self.tombstones else [])]
        return {entry.file for entry in named}

    def next(self, **changes: Any) -> Manifest:
        """The manifest after this one."""
        return replace(self, generation=self.generation + 1, **changes)


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest; when this returns, a power cut cannot take it back."""
    content = {MARK: VERSION, **asdict(manifest)}
    content["shards"] = [entry._asdict() for entry in manifest.shards]
    content["tombstones"] = manifest.tombstones and manifest.tombstones._asdict()
    content[HASH] = digest([_canonical(content)])
    text = json.dumps(content, indent=1).encode()
    write_aside(folder / MANIFEST, lambda file: file.write(text))


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a folder.

    Raises
    ------
    CorruptFile
        It is damaged, or of another version.
    FileNotFoundError
        The folder has none.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, "no corpus is here; nk.Corpus.create makes one", str(path)) from error
    try:
        content = json.loads(text)
        found = content.pop(HASH)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(f"{path}: {len(text)} bytes are no manifest of a corpus ({error!r})") from error
    if found != digest([_canonical(content)]):
        raise CorruptFile(f"{path}: its hash is not that of its contents: damaged")
    version = content.pop(MARK, None)
    if version != VERSION:
        raise CorruptFile(f"{path}: format version {version!r}, and this version of numkong_py reads {VERSION}")
    manifest = None
    with contextlib.suppress(TypeError, ValueError):
        content["shards"] = tuple(ShardEntry(**entry) for entry in content["shards"])
        content["tombstones"] = content["tombstones"] and TombstonesEntry(**content["tombstones"])
        manifest = Manifest(**content)
    if manifest is None or not _plausible(manifest):
        raise CorruptFile(f"{path}: fields are missing or out of range; another program wrote it")
    return manifest


def _plausible(manifest: Manifest) -> bool:
    """Whether names stay inside the folder and counts count."""
    entries = [*manifest.shards, *([manifest.tombstones] if manifest.tombstones else [])]
    counts = [count for entry in entries for count in (entry.bytes, entry.documents)]
    counts += [manifest.depth, manifest.shard_bytes, manifest.generation, manifest.next_id]
    return (
        all(type(entry.file) is str and Path(entry.file).name == entry.file for entry in entries)
        and all(type(count) is int and count >= 0 for count in counts)
        and manifest.depth > 0
        and manifest.shard_bytes > 0
        and manifest.dtype in SCORED
        and manifest.ids in (None, "int", "str")
        and isinstance(manifest.columns, dict)
    )
