"""Every CUDA kernel compiles without a GPU, with no spills and none of ptxas's warnings that wgmma was serialised."""

from __future__ import annotations

import subprocess
import sys

import pytest

from numkong_py.cuda import launch_table
from numkong_py.cuda.compile import Image, architecture_option, cache_directory, compile_image

try:
    from cupy.cuda import nvrtc

    SUPPORTED = tuple(nvrtc.getSupportedArchs())
    WHY_NOT = None
except Exception as error:  # CuPy or NVRTC is not installed
    SUPPORTED, WHY_NOT = (), f"NVRTC through CuPy is not here: {error}"

needs_nvrtc = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
NEWEST = f"sm_{max(SUPPORTED, default=0)}"
GENERAL = [
    *(
        ("maxsim_sm80.cu", {"DTYPE": dtype, "LISTED": listed})
        for dtype, listed in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 1))
    ),
    *(("token_stats.cu", {"DTYPE": dtype}) for dtype in range(3)),
    *(("topk.cu", {"F64": f64}) for f64 in range(2)),
    ("combine.cu", {}),
    ("refine_f32.cu", {}),
]


def check(image: Image) -> None:
    assert image.code
    assert image.spilled_bytes == 0, image.log
    assert not image.wgmma_warnings, image.log


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", NEWEST])
@pytest.mark.parametrize("source, macros", GENERAL, ids=lambda x: x if isinstance(x, str) else str(sorted(x.values())))
def test_portable_kernels_compile(source: str, macros: dict[str, int], architecture: str) -> None:
    check(compile_image(source, architecture, macros))


FORWARD = {
    (launch_table.forward(rows, stride, mode), mode, dtype)
    for mode in (launch_table.SCORE, launch_table.ARGMAX, launch_table.SCREEN)
    for rows, stride in ((64, 128), (128, 128), (256, 128), (256, 64), (256, 96), (64, 256), (256, 256), (256, 768))
    for dtype in (("f16",) if mode == launch_table.SCREEN else ("bf16",) if stride != 128 else ("bf16", "f16"))
}


@needs_nvrtc
@pytest.mark.parametrize("variant, mode, dtype", sorted(FORWARD), ids=str)
def test_forward_kernels_compile(variant: launch_table.Variant, mode: int, dtype: str) -> None:
    image = compile_image(variant.source, "sm_90a", variant.macros(mode, dtype))
    check(image)
    assert image.registers * variant.threads * variant.ctas <= 65536
    assert variant.shared_bytes * variant.ctas + 4096 <= 227 * 1024


@needs_nvrtc
def test_a_newer_device_gets_ptx() -> None:
    image = compile_image("combine.cu", architecture_option("sm80", 999, SUPPORTED), {})
    assert b".target" in image.code


def test_architecture_follows_row_and_device() -> None:
    assert architecture_option("sm90", 90, (80, 90)) == "sm_90a"
    assert architecture_option("sm80", 90, (80, 90)) == "sm_90"
    assert architecture_option("sm80", 86, (80, 90)) == "compute_80"
    assert architecture_option("sm80", 130, (80, 90, 120)) == "compute_120"


def test_import_is_light() -> None:
    code = "import sys, numkong_py.cuda as c; c.cuda_rows(); sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_cache_directory_is_the_callers_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("NUMKONG_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
