"""`PackedTensor`, an opaque packed collection, and what makes one: `pack`, and `open_file` from a file."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from . import reference
from .arrays import Collection, read_collection, read_indices
from .backends import BACKENDS, Row, select
from .codebook import BLOCK, Codebook, fill
from .cpu import CODED_DEPTH_MAX, open_packed
from .dtypes import name_of
from .errors import (
    BackendUnavailable,
    DeviceMismatch,
    IndexOutOfRange,
    InvalidArgument,
    MissingKernel,
    ShapeMismatch,
    UnsupportedDtype,
)
from .layout import EXACT, Coding, Contents
from .storage import RepackWarning, Stored, read, write

__all__ = [
    "PackedTensor",
    "from_bytes",
    "from_stored",
    "open_file",
    "pack",
    "pack_collection",
    "pack_size",
    "packed_shape",
]

PRECISIONS = ("exact", "int8", "fp8", "binary", "residual")


class PackedTensor:
    """A packed ragged collection of token sets, or a range of one: made by `pack`, scored by `maxsim`.

    It is opaque: no arithmetic, no elements. Its bytes never change, so threads may share it.

    Attributes
    ----------
    depth : int
    dtype : str
        ``"bf16"``, ``"f16"`` or ``"f32"``.
    precision : str
        ``"exact"``, or how its tokens are coded: ``"int8"``, ``"fp8"``, ``"binary"`` or ``"residual"``.
    device : str
        ``"cpu"`` or ``"cuda:<index>"``.
    backend : str
        Name of the row that packed it, which is the row that scores it.
    row : object
        That row, see `backends`.
    single : bool
        Packed from one 2-D array: as a query its results have no query axis.
    tokens : int
        Tokens of all sets together.
    buffer : array
        The packed bytes (of the whole collection, for a range of one), uint8.

    Examples
    --------
    >>> packed = pack([np.zeros((2, 4), np.float32), np.zeros((0, 4), np.float32), np.zeros((3, 4), np.float32)])
    >>> len(packed), packed.depth, packed.lengths
    (3, 4, array([2, 0, 3]))
    >>> packed[1:].lengths, packed[[2, 0]].lengths, packed[-1].single
    (array([0, 3]), array([3, 2]), True)
    """

    __slots__ = (
        "_contents",
        "_longest",
        "begin",
        "buffer",
        "depth",
        "device",
        "dtype",
        "end",
        "pointer",
        "precision",
        "row",
        "runnable",
        "single",
        "tokens",
    )

    __array_ufunc__ = None  # NumPy's operators refuse it instead of taking it for a sequence

    def __init__(
        self,
        contents: Contents,
        begin: int = 0,
        end: int | None = None,
        *,
        single: bool = False,
        runnable: bool = True,
    ) -> None:
        self._contents = contents
        self._longest: int | None = None
        self.row, self.buffer, self.pointer, self.dtype, self.depth, offsets, self.device, coding = contents
        self.precision = coding.precision
        self.begin = begin
        self.end = len(offsets) - 1 if end is None else end
        self.tokens = int(offsets[self.end] - offsets[self.begin])
        self.single = single
        self.runnable = runnable

    def __len__(self) -> int:
        return self.end - self.begin

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise UnsupportedDtype("a PackedTensor is no array; its vectors are in .unpack()")

    def __iter__(self) -> Iterator[PackedTensor]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        kind = "set" if self.single else f"collection of {len(self)}"
        return (
            f"<numkong_py.PackedTensor: {kind}, {self.tokens} tokens x {self.depth} {self.dtype}, {self.precision}, "
            f"row {self.backend!r} on {self.device}, {self.nbytes} bytes>"
        )

    def __getitem__(self, key: Any) -> PackedTensor:
        """One set or a range of sets without a copy, or a new packing of chosen sets.

        Raises
        ------
        IndexOutOfRange
            An index is outside the collection.
        """
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1:
                return self._range(start, max(start, stop), single=False)
            return self._gather(np.arange(start, stop, step))
        if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
            index = self._within(int(key))
            return self._range(index, index + 1, single=True)
        return self._gather(self._chosen(key))

    def _within(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexOutOfRange(f"index {index} is outside a collection of {len(self)}")
        return index % len(self)

    def _chosen(self, key: Any) -> np.ndarray:
        mask = np.asarray(key) if isinstance(key, (list, np.ndarray)) else None
        if mask is not None and mask.dtype == bool:
            if mask.shape != (len(self),):
                raise ShapeMismatch(f"index: a mask of shape {mask.shape}, wanted ({len(self)},)")
            return np.flatnonzero(mask)
        indices = read_indices(key, "index")
        if indices.ndim != 1:
            raise ShapeMismatch(f"index: shape {indices.shape}, wanted one dimension")
        return np.array([self._within(int(index)) for index in indices], np.int64)

    def _range(self, start: int, stop: int, single: bool) -> PackedTensor:
        return PackedTensor(
            self._contents, self.begin + start, self.begin + stop, single=single, runnable=self.runnable
        )

    def _gather(self, indices: np.ndarray) -> PackedTensor:
        if self.precision != "exact":
            return PackedTensor(self._taken(indices), runnable=self.runnable)
        sets = [self[int(index)].unpack() for index in indices]
        return pack_collection(self._collection(sets), self.row)

    def _taken(self, indices: np.ndarray | None = None, row: Any = None) -> Contents:
        """Codes of chosen sets (all of its own without indices), bit for bit, as a new buffer of a row."""
        indices = np.arange(len(self)) if indices is None else indices
        return self.row.take(self._contents, self.begin + indices, row)

    def _collection(self, x: Any) -> Collection:
        return read_collection(x, "x", depth=self.depth, dtype=self.dtype)

    @property
    def offsets(self) -> np.ndarray:
        """Where every set starts, in tokens: int64 [count + 1], from 0 to `tokens`."""
        offsets = self._contents.offsets[self.begin : self.end + 1]
        return offsets - offsets[0]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in every set: int64 [count]."""
        return np.diff(self._contents.offsets[self.begin : self.end + 1])

    @property
    def longest(self) -> int:
        """Tokens in the longest set."""
        if self._longest is None:
            self._longest = self.tokens if len(self) == 1 else int(self.lengths.max(initial=0))
        return self._longest

    @property
    def backend(self) -> str:
        """Name of the row that packed it."""
        return self.row.name

    @property
    def nbytes(self) -> int:
        """Bytes of the packed buffer; a range of a collection holds on to all of it."""
        return self.buffer.nbytes

    @property
    def contents(self) -> Contents:
        """The packed buffer and what its header says, for the row."""
        return self._contents

    def require(self) -> None:
        """Raise unless the row that packed it can run here.

        Raises
        ------
        BackendUnavailable
        """
        if not self.runnable:
            raise BackendUnavailable(
                f'packed by row {self.backend!r}, which is not available here: {self.row.reason}; pass .to("cpu") of it'
            )

    def to(self, backend_or_device: str) -> PackedTensor:
        """Pack the stored tokens with another row, or with the best one of a device; itself if nothing changes.

        Codes stay what they are, bit for bit.

        Parameters
        ----------
        backend_or_device : str
            A row's name, ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``.

        Raises
        ------
        BackendUnavailable, MissingKernel, InvalidArgument

        Examples
        --------
        >>> pack(np.ones((2, 4), np.float32)).to("serial").backend
        'serial'
        """
        kind = str(backend_or_device).partition(":")[0]
        if kind in ("cpu", "cuda"):
            row, device = select(self.dtype, kind), backend_or_device
        else:
            device = next((row.device for row in BACKENDS if row.name == backend_or_device), "cpu")
            row = select(self.dtype, device, backend=backend_or_device)
        if row is self.row and (device == kind or device == self.device):
            return self
        if self.precision != "exact":
            _need_host(self.precision, row.device)
            return PackedTensor(self._taken(row=row), single=self.single)
        tokens = self.unpack()
        if row.device == "cpu" and self.device != "cpu":
            tokens = tokens.get() if self.single else [part.get() for part in tokens]
        return pack_collection(self._collection(tokens), row, device=device)

    def unpack(self) -> Any:
        """Give back the stored tokens, bit for bit: one array for a single set, else a list of arrays.

        Of a coded packing, what its codes stand for: float32.

        Examples
        --------
        >>> pack(np.float32([[1, 2]])).unpack()
        array([[1., 2.]], dtype=float32)
        """
        offsets = self._contents.offsets[self.begin : self.end + 1]
        tokens = self.row.unpack(self._contents, int(offsets[0]), int(offsets[-1]))
        if self.single:
            return tokens
        edges = (offsets - offsets[0]).tolist()
        return [tokens[start:stop] for start, stop in pairwise(edges)]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a safetensors file that `open` maps; a range of a collection writes only itself.

        The file is written under another name in the same folder, flushed to the disk and renamed, so a crash or an
        error leaves what was there, and readers that have the old file mapped keep it.

        Parameters
        ----------
        path : path
            Any suffix; ``.safetensors`` lets other tools list it. docs/storage.md says what they see.

        Raises
        ------
        OSError
            Of the kind that the system reports (disk full, read-only), naming the path.
        DeviceMismatch
            It is on a device.
        InvalidArgument
            The path is a folder or a device.

        Examples
        --------
        >>> import tempfile
        >>> from numkong_py import open
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pack([np.ones((2, 4), np.float32), np.ones((3, 4), np.float32)]).save(f"{folder}/corpus.safetensors")
        ...     open(f"{folder}/corpus.safetensors").lengths
        array([2, 3])
        """
        if self.device != "cpu":
            raise DeviceMismatch(
                f'packed: on {self.device}, and files are packed in host memory; pass .to("cpu") of it'
            )
        contents = self._contents
        if not self._whole:
            self.require()
            exact = self.precision == "exact"
            contents = self.row.pack(self._collection(self.unpack())) if exact else self._taken()
        write(path, contents, single=self.single)

    @property
    def _whole(self) -> bool:
        return self.begin == 0 and self.end == len(self._contents.offsets) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        if self.precision != "exact":
            return _restore, (self.buffer if self._whole else self._taken().buffer, self.single)
        if self._whole and self.device == "cpu":
            return _restore, (self.buffer, self.single)
        return _repack, (self.unpack(), self.depth, self.dtype, self.backend)


def _restore(buffer: np.ndarray, single: bool) -> PackedTensor:
    contents = open_packed(buffer)
    return PackedTensor(contents, single=single, runnable=contents.row.available)


def _repack(x: Any, depth: int, dtype: str, backend: str) -> PackedTensor:
    collection = read_collection(x, "x", depth=depth, dtype=dtype)
    return pack_collection(collection, select(dtype, collection.device, backend=backend))


def from_bytes(buffer: Any, *, single: bool = False) -> PackedTensor:
    """Wrap packed bytes (a uint8 array, a memory map, anything with the buffer protocol) after checking them.

    Nothing is copied unless the bytes start off a 16-byte boundary.

    Raises
    ------
    LayoutMismatch
        They are damaged, too few, or of another format.

    Examples
    --------
    >>> from_bytes(pack(np.ones((2, 4), np.float32)).buffer).tokens
    2
    """
    contents = open_packed(_as_bytes(buffer))
    return PackedTensor(contents, single=single, runnable=contents.row.available)


def open_file(path: str | os.PathLike[str], *, mmap: bool = True, verify: str = "header") -> PackedTensor:
    """Open a file that `PackedTensor.save` wrote, memory-mapped: scoring reads the pages that it needs.

    Nothing is trusted before the file's size, its headers and the document offsets are right and their hashes agree:
    8 bytes are read per document, none per token.

    Parameters
    ----------
    path : path
    mmap : bool
        False reads the file into memory, for file systems that cannot map, or files that others rewrite in place.
    verify : {"header", "full"}
        ``"full"`` reads all of it and checks all hashes first.

    Returns
    -------
    PackedTensor
        Read-only. A file of a row that cannot run here is packed again in memory, which a `RepackWarning` says.

    Raises
    ------
    CorruptFile
        It is no such file, or is truncated or damaged.
    OSError
        It cannot be read.
    InvalidArgument

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pack(np.ones((3, 8), np.float32)).save(f"{folder}/set.safetensors")
    ...     open_file(f"{folder}/set.safetensors", verify="full").tokens
    3
    """
    stored = read(path, mmap=mmap, verify=verify)
    packed = from_stored(stored)
    if stored.unavailable:
        warnings.warn(
            f"{path}: packed by row {stored.row!r}, which cannot run here ({stored.unavailable}): its "
            f"{packed.tokens} tokens are packed again in memory by row {packed.backend!r}; save the result to map it "
            "next time",
            RepackWarning,
            stacklevel=2,
        )
    return packed


def from_stored(stored: Stored) -> PackedTensor:
    """What a checked file holds: as it lies, or packed again in memory where its row cannot run here."""
    if stored.unavailable and stored.coding != EXACT:
        row = select(stored.dtype)
        depth = stored.originals.shape[1]
        contents = Contents(row, stored.buffer, None, stored.dtype, depth, stored.offsets, "cpu", stored.coding)
        return PackedTensor(row.take(contents, np.arange(len(stored.offsets) - 1)), single=stored.single)
    if stored.unavailable:
        return pack_collection(stored.collection(), select(stored.dtype))
    return PackedTensor(stored.contents, single=stored.single)


def _as_bytes(buffer: Any) -> np.ndarray:
    try:
        return np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise UnsupportedDtype(
            f"packed: a {type(buffer).__name__}, wanted a PackedTensor or contiguous bytes ({error})"
        ) from error


def pack_collection(
    collection: Collection,
    row: Row,
    *,
    normalize: bool = False,
    device: str | None = None,
    coding: Coding = EXACT,
) -> PackedTensor:
    """Pack a collection with a row that was selected for its dtype and device."""
    if collection.device.partition(":")[0] != row.device and device is None:
        raise DeviceMismatch(f"x: on {collection.device}, and row {row.name!r} works on {row.device}; pass device=")
    if coding == EXACT:
        return PackedTensor(row.pack(collection, normalize), single=collection.single)
    _need_host(coding.precision, row.device)
    _need_shallow(coding.precision, collection.depth)
    return PackedTensor(row.pack(collection, normalize, coding), single=collection.single)


def _need_host(precision: str, device: str) -> None:
    if device != "cpu":
        raise MissingKernel(
            f"precision: {precision!r} has CPU rows only, and this is for {device}; pack a copy of x in host memory, "
            'or pass precision="exact"'
        )


def _need_shallow(precision: str, depth: int) -> None:
    if depth > CODED_DEPTH_MAX:
        raise ShapeMismatch(
            f"x: depth {depth}, and precision {precision!r} takes at most {CODED_DEPTH_MAX}, past which sums of its "
            'codes could wrap; pass precision="exact"'
        )


def read_coding(precision: Any, codebook: Any = None) -> Coding:
    """The coding of `pack`'s options."""
    if precision not in PRECISIONS:
        raise InvalidArgument(f"precision: {precision!r}, wanted one of {', '.join(map(repr, PRECISIONS))}")
    if precision != "residual" and codebook is not None:
        raise InvalidArgument(f'codebook: precision {precision!r} has none; pass precision="residual" with it')
    if precision != "residual":
        return Coding(precision)
    if not isinstance(codebook, Codebook):
        raise InvalidArgument(
            f"codebook: a {type(codebook).__name__}, and precision 'residual' needs a Codebook; pass "
            "codebook=nk.train_codebook(x, centroids=...)"
        )
    return codebook.coding


def _pack_residuals(collection: Collection, row: Row, codebook: Codebook, normalize: bool) -> PackedTensor:
    """Pack a collection block by block with the codes of a codebook."""
    _need_shallow("residual", collection.depth)
    if collection.depth != codebook.depth:
        raise ShapeMismatch(
            f"x: depth {collection.depth}, and the codebook's is {codebook.depth}; train one on tokens of x"
        )
    blocks = map(reference.normalized, collection.blocks(BLOCK)) if normalize else collection.blocks(BLOCK)
    buffer, target = row.lay_out(collection.offsets, collection.depth, collection.dtype, codebook.coding)
    fill(target, codebook, (codebook.encode(block.astype(np.float32)) for block in blocks))
    return PackedTensor(row.seal(buffer), single=collection.single)


def pack(
    x: Any,
    *,
    offsets: Any = None,
    lengths: Any = None,
    mask: Any = None,
    dtype: Any = None,
    depth: int | None = None,
    precision: str = "exact",
    codebook: Codebook | None = None,
    normalize: bool = False,
    backend: str | None = None,
    capabilities: int | None = None,
    device: str | None = None,
    check_finite: bool = False,
) -> PackedTensor:
    """Pack token vectors once, for any number of scorings.

    Parameters
    ----------
    x : array, list of arrays or Collection
        ``[n, depth]`` one set; a list of ``[n_i, depth]``; ``[total, depth]`` with `offsets`; ``[count, longest,
        depth]`` with `lengths`, `mask` or neither. bf16, f16 or f32 of any strides.
    offsets, lengths, mask : array, optional
        See `collection`.
    dtype : str or dtype, optional
        Element type to insist on; ``"bf16"`` reads uint16 arrays as bfloat16 bits.
    depth : int, optional
        Depth of an empty list.
    precision : {"exact", "int8", "fp8", "binary", "residual"}
        ``"exact"`` keeps the vectors bit for bit. ``"int8"`` and ``"fp8"`` (e4m3) keep a byte an element and a scale a
        token, ``"binary"`` a bit an element, ``"residual"`` 1 to 8 bits an element and the number of a centroid: scores
        are float32, and `maxsim`'s bounds say how far they can be from the exact ones (docs/precision.md).
    codebook : Codebook, optional
        Of ``"residual"``, which needs one: `train_codebook` makes it.
    normalize : bool
        Store every token divided by its L2 norm, rounded to its dtype; zero tokens stay.
    backend : str, optional
        Name of a row to force.
    capabilities : Capability, optional
        Choose the best row within this mask.
    device : str, optional
        Where to pack: ``"cpu"``, ``"cuda"``, ``"cuda:<index>"``. Default: where x is.
    check_finite : bool
        Refuse NaN and infinities.

    Returns
    -------
    PackedTensor

    Raises
    ------
    UnsupportedDtype, ShapeMismatch, DeviceMismatch, MissingKernel, BackendUnavailable, InvalidArgument

    Examples
    --------
    >>> pack(np.ones((3, 8), np.float32), backend="serial").backend
    'serial'
    >>> pack(np.float32([[1, -0.5, 0.25, 0]]), precision="int8").unpack().round(3)
    array([[ 1.   , -0.504,  0.252,  0.   ]], dtype=float32)
    """
    if isinstance(x, PackedTensor):
        raise InvalidArgument("x: packed already; x.to(backend) packs it with another row")
    coding = read_coding(precision, codebook)
    found = read_collection(x, "x", offsets=offsets, lengths=lengths, mask=mask, dtype=dtype, depth=depth)
    if coding != EXACT:
        _need_host(precision, device or found.device)
    row = select(found.dtype, device or found.device, backend=backend, capabilities=capabilities)
    if codebook is not None:
        packed = _pack_residuals(found, row, codebook, normalize)
    else:
        packed = pack_collection(found, row, normalize=normalize, device=device, coding=coding)
    if check_finite:
        _check_finite(packed)
    return packed


def _check_finite(packed: PackedTensor) -> None:
    token = packed.row.first_nonfinite(packed.contents)
    if token is None:
        return
    document = int(np.searchsorted(packed.offsets, token, side="right")) - 1
    raise InvalidArgument(
        f"x: document {document} has a NaN or an infinity in its valid token {token - int(packed.offsets[document])}; "
        "remove it, mask it, or pass check_finite=False"
    )


def pack_size(
    count: int,
    depth: int,
    dtype: Any,
    *,
    documents: int = 1,
    precision: str = "exact",
    codebook: Codebook | None = None,
    backend: str | None = None,
    capabilities: int | None = None,
) -> int:
    """Bytes of a packed buffer.

    Parameters
    ----------
    count : int
        Tokens of all documents together.
    depth : int
    dtype : str or dtype
    documents : int
        Sets that the tokens belong to.
    precision, codebook, backend, capabilities
        As for `pack`.

    Raises
    ------
    MissingKernel, BackendUnavailable, ShapeMismatch, InvalidArgument

    Examples
    --------
    >>> pack_size(2, 4, "f32") == pack(np.ones((2, 4), np.float32)).nbytes
    True
    """
    for name, value, least in (("count", count, 0), ("depth", depth, 1), ("documents", documents, 0)):
        if not least <= operator.index(value) < 1 << 64:
            raise ShapeMismatch(f"{name}: {value}, wanted {least} or more, in 64 bits")
    name = name_of(dtype)
    coding = read_coding(precision, codebook)
    row = select(name, backend=backend, capabilities=capabilities)
    if coding == EXACT:
        return row.pack_size(documents, count, depth, name)
    _need_host(precision, row.device)
    _need_shallow(precision, depth)
    return row.pack_size(documents, count, depth, name, coding)


def packed_shape(packed: Any) -> tuple[int, int]:
    """Tokens and depth of a `PackedTensor` or of raw packed bytes, which are checked.

    Raises
    ------
    LayoutMismatch
        The bytes are not a packed buffer, or are damaged.

    Examples
    --------
    >>> packed_shape(pack(np.ones((3, 8), np.float32)))
    (3, 8)
    """
    if not isinstance(packed, PackedTensor):
        packed = from_bytes(packed)
    return packed.tokens, packed.depth
