"""`test_jax.py` and the doctests of `numkong_py.jax` with the oldest JAX that is supported and with the newest one.

Both are installed into a cache beside the packages that are already here, so the extension under test is this one.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from oracle import ROOT
from tools import pip_packages

OLDEST, NEWEST = ("jax==0.6.2", "jaxlib==0.6.2"), ("jax", "jaxlib", "optax")
TESTS = ("tests/test_jax.py", "numkong_py/jax")


@pytest.mark.slow
@pytest.mark.parametrize("requirements", [OLDEST, NEWEST], ids=["oldest", "newest"])
def test_with(requirements: tuple[str, ...]) -> None:
    folder = pip_packages("jax", "--upgrade", "--only-binary=:all:", *requirements)
    chosen = TESTS if "optax" in requirements else (*TESTS, "-k", "not training_example")
    path = os.pathsep.join([str(ROOT), str(folder)])
    code = f"import sys; sys.path[:0] = {[str(ROOT)]!r}; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "-q", "-o", "addopts=--doctest-modules", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout, done.stdout[-2000:]
