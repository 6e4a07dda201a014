"""Late-interaction scoring (MaxSim): pack once, score exactly, on every CPU and GPU row.

Examples
--------
>>> import numpy as np
>>> import numkong_py as nk
>>> documents = nk.pack([np.eye(4, dtype=np.float32), np.ones((2, 4), np.float32)])
>>> nk.maxsim(np.float32([[1, 2, 3, 4]]), documents)
array([ 4., 10.])
"""

from . import reference
from .arrays import Collection, collection
from .backends import backends, find_kernel
from .chamfer import ChamferResult, chamfer, chamfer_grad
from .codebook import Codebook, train_codebook
from .corpus import Corpus
from .cpu import Capability, compiled_capabilities, enabled_capabilities, error_bound, output_dtype
from .cpu import detected_capabilities as capabilities
from .dispatch import maxsim, maxsim_candidates, maxsim_pairs, topk
from .errors import (
    BackendUnavailable,
    CorpusLocked,
    CorruptFile,
    DeviceMismatch,
    DuplicateId,
    IndexOutOfRange,
    InvalidArgument,
    LayoutMismatch,
    MissingKernel,
    NumKongError,
    OutOfMemory,
    ShapeMismatch,
    UnknownId,
    UnsupportedDtype,
)
from .gradient import maxsim_candidates_grad, maxsim_grad, maxsim_pairs_grad
from .interop import from_plaid, read_tokens, write_tokens
from .ops import maxsim_packed
from .packed import PackedTensor, pack, pack_size, packed_shape
from .packed import open_file as open  # noqa: F401  not in __all__: a star import must not hide the built-in
from .reference import MaxSimResult
from .report import ErrorReport, error_report
from .storage import RepackWarning
from .two_stage import TwoStageResult, topk_two_stage

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "Capability",
    "ChamferResult",
    "Codebook",
    "Collection",
    "Corpus",
    "CorpusLocked",
    "CorruptFile",
    "DeviceMismatch",
    "DuplicateId",
    "ErrorReport",
    "IndexOutOfRange",
    "InvalidArgument",
    "LayoutMismatch",
    "MaxSimResult",
    "MissingKernel",
    "NumKongError",
    "OutOfMemory",
    "PackedTensor",
    "RepackWarning",
    "ShapeMismatch",
    "TwoStageResult",
    "UnknownId",
    "UnsupportedDtype",
    "backends",
    "capabilities",
    "chamfer",
    "chamfer_grad",
    "collection",
    "compiled_capabilities",
    "enabled_capabilities",
    "error_bound",
    "error_report",
    "find_kernel",
    "from_plaid",
    "maxsim",
    "maxsim_candidates",
    "maxsim_candidates_grad",
    "maxsim_grad",
    "maxsim_packed",
    "maxsim_pairs",
    "maxsim_pairs_grad",
    "output_dtype",
    "pack",
    "pack_size",
    "packed_shape",
    "read_tokens",
    "reference",
    "topk",
    "topk_two_stage",
    "train_codebook",
    "write_tokens",
]
