"""Exceptions: each is a `NumKongError` and the built-in that it specialises."""

from __future__ import annotations

__all__ = [
    "BackendUnavailable",
    "CorpusLocked",
    "CorruptFile",
    "DeviceMismatch",
    "DuplicateId",
    "IndexOutOfRange",
    "InvalidArgument",
    "LayoutMismatch",
    "MissingKernel",
    "NumKongError",
    "OutOfMemory",
    "ShapeMismatch",
    "UnknownId",
    "UnsupportedDtype",
]


class NumKongError(Exception):
    """Base of everything that this package raises on purpose."""


class UnsupportedDtype(NumKongError, TypeError):
    """An array has an element type that is not scored, or two sides have different ones."""


class ShapeMismatch(NumKongError, ValueError):
    """Shapes, counts, offsets, lengths, masks or depths do not fit."""


class DeviceMismatch(NumKongError, ValueError):
    """Two arrays live on different devices, or a row cannot reach an array."""


class LayoutMismatch(NumKongError, ValueError):
    """Packed bytes belong to another row or format, or are damaged."""


class MissingKernel(NumKongError, ValueError):
    """No usable row has a kernel for the element type."""


class InvalidArgument(NumKongError, ValueError):
    """An option has a value that does not exist."""


class IndexOutOfRange(NumKongError, ValueError, IndexError):
    """A document index points outside the collection."""


class BackendUnavailable(NumKongError, RuntimeError):
    """A row was asked for by name and this machine or build cannot run it."""


class OutOfMemory(NumKongError, MemoryError):
    """Scratch memory could not be allocated."""


class CorruptFile(NumKongError, OSError):
    """A file does not hold what its header or name promises."""


class CorpusLocked(NumKongError, OSError):
    """Another process or thread is writing to the corpus."""


class DuplicateId(NumKongError, ValueError):
    """An id is given twice, or belongs to a document that is in the corpus already."""


class UnknownId(NumKongError, LookupError):
    """No document of the corpus has the id."""
