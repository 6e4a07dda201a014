"""Every CUDA kernel compiles without a GPU, with no spills and none of ptxas's warnings that wgmma was serialised.

The table of kernels is `numkong_py.cuda.kernels`. What was compiled once is not compiled again (a cache by content).
In CI, where NVRTC and CuPy are not installed, they are put into a folder of the cache, for a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from numkong_py.cuda import kernels
from numkong_py.cuda.compile import HERE, architecture_option, cache_directory, compile_image, image_key

TOOLS = ("cupy-cuda12x", "fastrlock", "cuda-pathfinder", "nvidia-cuda-nvrtc-cu12")
FORMS = kernels.forms()
PROBE = "from cupy.cuda import nvrtc; print(nvrtc.getVersion())"


# ------------------------------------------------------------------------------------- the compiler


def _environment(site: Path | None) -> dict[str, str]:
    """Where a process finds this package, and CuPy and NVRTC in a folder of their own."""
    paths = [str(HERE.parents[1]), *([str(site)] if site else [])]
    libraries = [str(folder) for folder in site.glob("nvidia/*/lib")] if site else []
    found = {"PYTHONPATH": paths, "LD_LIBRARY_PATH": libraries}
    before = {name: os.environ.get(name, "") for name in found}
    return {**os.environ, **{name: os.pathsep.join([*new, before[name]]) for name, new in found.items()}}


def _run(site: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], env=_environment(site), capture_output=True, text=True)


@pytest.fixture(scope="session")
def site() -> Path | None:
    """Folder with CuPy and NVRTC, or None where this interpreter has them."""
    if find_spec("cupy") is not None and _run(None, "-c", PROBE).returncode == 0:
        return None
    folder = cache_directory() / f"compiler-{sys.version_info[0]}.{sys.version_info[1]}"
    if _run(folder, "-c", PROBE).returncode == 0:
        return folder
    if not os.environ.get("CI"):
        pytest.skip("CuPy or NVRTC is not installed: pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12")
    install = _run(None, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder), *TOOLS)
    works = _run(folder, "-c", PROBE)
    if works.returncode != 0:
        pytest.fail(f"CI must compile the CUDA kernels, but has no NVRTC:\n{install.stderr}\n{works.stderr}")
    return folder


# ------------------------------------------------------------------------------------- the gate


def test_every_kernel_compiles_without_spills_or_serialised_wgmma(site: Path | None) -> None:
    done = _run(site, __file__)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {name.partition(" ")[0] for name in report["forms"]} == {path.name for path in HERE.glob("*.cu")}
    assert not report["faults"], "\n\n".join(report["faults"])
    assert report["fallback_is_ptx"]


def _check(source: str, architecture: str, macros: dict[str, int]) -> str:
    """What is wrong with one compiled form, or nothing; known already where nothing that goes into it has changed."""
    kept = cache_directory() / "checked" / image_key(source, architecture, macros)
    if kept.exists():
        return kept.read_text()
    image = compile_image(source, architecture, macros)
    faults = [f"{image.spilled_bytes} bytes spilled"] * (image.spilled_bytes > 0) + image.wgmma_warnings
    text = f"{source} {macros} for {architecture}: {'; '.join(faults)}\n{image.log}" if faults else ""
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(text)
    return text


def _is_twin(form: kernels.Form) -> bool:
    """Whether a form differs from another one only in the type that its wgmma names, f16 for bf16."""
    twin = {**form.macros, "BF16": 1}
    return form.macros.get("BF16") == 0 and any((other.source, other.macros) == (form.source, twin) for other in FORMS)


def _gate() -> dict[str, Any]:
    from cupy.cuda import nvrtc

    known = tuple(nvrtc.getSupportedArchs())
    newest = {"newest": f"sm_{max(known)}"}
    work = [
        (form.source, newest.get(architecture, architecture), form.macros)
        for form in FORMS
        if not _is_twin(form)
        for architecture in form.architectures
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as pool:
        faults = [text for text in pool.map(lambda form: _check(*form), work) if text]
    fallback = compile_image("token_stats.cu", architecture_option("sm80", 999, known), {"DTYPE": 0})
    forms = [f"{source} {architecture} {macros}" for source, architecture, macros in work]
    return {"forms": forms, "faults": faults, "fallback_is_ptx": b".target" in fallback.code}


# ------------------------------------------------------------------------------------- what needs no compiler


def test_every_kernel_file_is_in_the_table() -> None:
    assert {form.source for form in kernels.forms()} == {path.name for path in HERE.glob("*.cu")}


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


if __name__ == "__main__":
    print(json.dumps(_gate()))
