"""Every CUDA kernel and the forms that it is compiled in: the table behind the compile test and `warmup`.

A new ``.cu`` file joins by one line of `KERNELS`. Nothing here touches CuPy or a device.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from . import launch_table

__all__ = ["DTYPE_IDS", "HOPPER", "KERNELS", "PORTABLE", "Form", "Kernels", "forms"]

DTYPE_IDS = {"bf16": 0, "f16": 1, "f32": 2}  # the macro DTYPE
HOPPER = ("sm_90a",)
PORTABLE = ("sm_80", "sm_90a", "newest")  # the newest that the compiler knows


class Form(NamedTuple):
    """A ``.cu`` file with a value for each of its macros, and the architectures that it is compiled for."""

    source: str
    macros: dict[str, int]
    architectures: tuple[str, ...]


class Kernels(NamedTuple):
    """All forms of a ``.cu`` file."""

    source: str
    architectures: tuple[str, ...]
    macros: tuple[dict[str, int], ...] = ({},)


def grid(**values: tuple[int, ...]) -> tuple[dict[str, int], ...]:
    """Every combination of the macros' values.

    Examples
    --------
    >>> grid(DTYPE=(0, 1), F64=(0,))
    ({'DTYPE': 0, 'F64': 0}, {'DTYPE': 1, 'F64': 0})
    """
    return tuple(dict(zip(values, chosen)) for chosen in product(*values.values()))


def _forward(source: str) -> tuple[dict[str, int], ...]:
    """What the launch table picks for any number of query rows and any depth."""
    found = []
    for mode in (launch_table.SCORE, launch_table.ARGMAX, launch_table.SCREEN):
        variants = {v for v in launch_table.all_variants(mode, launch_table.DEPTH_CLASSES) if v.source == source}
        for dtype in ("f16",) if mode == launch_table.SCREEN else ("bf16", "f16"):
            found += [variant.macros(mode, dtype) for variant in variants]
    return tuple({repr(macros): macros for macros in found}.values())


# Gradients. Of what is left out here, f16 differs from bf16 in conversions alone, other output types in stores.
GRADIENT = grid(DTYPE=(0,), LANES=(16,), VECTOR=(1,), OUT_F32=(0,), COSINE=(0,))
OTHER_GRADIENTS = (
    *grid(DTYPE=(0,), LANES=(16,), VECTOR=(1,), OUT_F32=(0,), COSINE=(1,)),
    *grid(DTYPE=(2,), LANES=(16,), VECTOR=(1,), OUT_F32=(1,), COSINE=(0, 1)),
    *grid(DTYPE=(2,), LANES=(8,), VECTOR=(0,), OUT_F32=(1,), COSINE=(0,)),
)


def _by_owner(gradients: tuple[dict[str, int], ...], **values: tuple[int, ...]) -> tuple[dict[str, int], ...]:
    """Forms of the kernel that goes back to the documents, or that moves clouds (`DIFFERENCE`)."""
    chosen = {"BATCHED": (0, 1), "DIFFERENCE": (0,), "LISTED": (0,), **values}
    return tuple({**form, **more} for form in gradients for more in grid(**chosen))


KERNELS = (
    Kernels("maxsim_forward_sm90.cu", HOPPER, _forward("maxsim_forward_sm90.cu")),
    Kernels("maxsim_deep_sm90.cu", HOPPER, _forward("maxsim_deep_sm90.cu")),
    Kernels("maxsim_sm80.cu", PORTABLE, (*grid(DTYPE=(0, 1), LISTED=(0, 1)), {"DTYPE": 2, "LISTED": 1})),
    Kernels("token_stats.cu", PORTABLE, grid(DTYPE=(0, 1, 2))),
    Kernels("normalize.cu", PORTABLE, grid(DTYPE=(0, 1, 2))),
    Kernels("topk.cu", PORTABLE, grid(F64=(0, 1))),
    Kernels("combine.cu", HOPPER),
    Kernels("refine_f32.cu", HOPPER),
    Kernels("maxsim_grad_queries.cu", PORTABLE, GRADIENT),
    Kernels("maxsim_grad_queries.cu", HOPPER, OTHER_GRADIENTS),
    Kernels("maxsim_grad_slices.cu", PORTABLE, GRADIENT),
    Kernels("maxsim_grad_slices.cu", HOPPER, OTHER_GRADIENTS),
    Kernels("maxsim_grad_documents.cu", PORTABLE, _by_owner(GRADIENT)),
    Kernels("maxsim_grad_documents.cu", HOPPER, _by_owner(OTHER_GRADIENTS)),
    Kernels("maxsim_grad_documents.cu", HOPPER, _by_owner(GRADIENT, BATCHED=(1,), LISTED=(1,))),
    Kernels("maxsim_grad_documents.cu", HOPPER, _by_owner(OTHER_GRADIENTS[-1:], DIFFERENCE=(1,))),
    Kernels("stable_sort.cu", PORTABLE, grid(STEP=(0, 1, 2, 3))),
    Kernels("chamfer_cells.cu", PORTABLE, grid(DTYPE=(2,), STEP=(0, 1, 2))),
    Kernels("chamfer_nearest.cu", PORTABLE),
    Kernels("chamfer_deep.cu", PORTABLE, grid(DTYPE=(0, 2))),
    Kernels("chamfer_squares.cu", PORTABLE, grid(DTYPE=(0, 2))),
    Kernels("chamfer_sum.cu", PORTABLE),
)


def forms() -> list[Form]:
    """Every form of every kernel."""
    return [Form(kernels.source, macros, kernels.architectures) for kernels in KERNELS for macros in kernels.macros]
