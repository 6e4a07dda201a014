"""Rows whose instructions this machine lacks, run against software models: the conformance suite in a process apart.

The models (tests/emulation) are checked first, against plain C. Then the package is built once with the models in
place, and every modelled row goes through tests/test_conformance.py and tests/test_coded.py there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS / "emulation"))

import build  # noqa: E402 (the folder of the models is no package)

ALWAYS_MODELLED = ("alder", "sapphireamx")
MODELLED_WITHOUT_AVX512 = ("icelake", "genoa")
ROWS = ALWAYS_MODELLED + (MODELLED_WITHOUT_AVX512 if build.models_avx512() else ())

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    """Skip where nothing can be emulated; in CI on x86-64 Linux fail instead, because there it can be put right."""
    reason = build.obstacle()
    if reason and os.environ.get("CI") == "true" and build.is_x86_linux():
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the package built against the models."""
    folder = tmp_path_factory.mktemp("emulated")
    build.build_package(folder)
    return folder


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the emulated package."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMKONG_CAPABILITIES"}
    environment["PYTHONPATH"] = os.pathsep.join([str(package), str(TESTS / "emulation")])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=package,
        env=environment,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_models_agree_with_plain_c() -> None:
    result = build.run_selftest(hardware=False)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("ok  ") >= 8, result.stdout


@pytest.mark.skipif(
    not build.machine_flags() >= build.HARDWARE_FLAGS, reason="this processor lacks a modelled instruction"
)
def test_the_processor_agrees_with_plain_c() -> None:
    result = build.run_selftest(hardware=True)
    assert result.returncode == 0, result.stdout


def test_modelled_rows_are_available_in_the_emulated_package(package: Path) -> None:
    script = (
        "import json, numkong_py as nk; print(json.dumps([nk.__file__, {b.name: b.available for b in nk.backends()}]))"
    )
    result = run(package, "-c", script)
    assert result.returncode == 0, result.stdout
    file, available = json.loads(result.stdout)
    assert Path(file).is_relative_to(package), "the emulated build was not imported"
    assert all(available[row] for row in ROWS), available


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    ("suite", "least"), [("test_conformance.py", 100), ("test_coded.py", 15), ("test_in_place.py", 3)]
)
def test_conformance_of_a_modelled_row(package: Path, row: str, suite: str, least: int) -> None:
    options = ["-q", "-p", "sampling", "-p", "no:cacheprovider", "--row", row, "--every", "4", "--tb=short"]
    result = run(package, "-m", "pytest", *options, "--rootdir", str(TESTS.parent), str(TESTS / suite))
    assert result.returncode == 0, result.stdout[-8000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed and int(passed[1]) >= least, result.stdout[-2000:]
