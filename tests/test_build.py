"""The source distribution: what it holds, and that it builds and works in an environment of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("c/**/*.c", "c/**/*.inc", "c/**/*.h", "include/numkong/*", "numkong_py/**/*.py", "numkong_py/**/*.cu")
CHECK = """
import numpy as np, numkong_py as nk, numkong_py._numkong as extension
from numkong_py import demo
assert "site-packages" in nk.__file__, nk.__file__
assert np.array_equal(nk.maxsim(np.float32([[1, 2]]), [np.float32([[3, 4]]), np.float32([[5, 6]])]), [11, 17])
assert demo.load().passages
print(extension.__file__)
"""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="the `build` package is not installed")
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "build", "--sdist", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (found,) = folder.glob("*.tar.gz")
    return found


@pytest.mark.slow
def test_the_sdist_holds_every_source(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {path.relative_to(ROOT).as_posix() for pattern in SOURCES for path in ROOT.glob(pattern)}
    assert expected - names == set()
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py", "numkong_py/py.typed"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]


@pytest.mark.slow
def test_the_sdist_installs_into_a_clean_environment(sdist: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"

    def run(*command: str) -> str:
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CFLAGS")}
        result = subprocess.run(
            [str(python), *command], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=600, check=False
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        return result.stdout

    run("-m", "pip", "install", "--quiet", str(sdist))
    extension = run("-c", CHECK)
    if not sysconfig.get_config_var("Py_GIL_DISABLED") and os.name == "posix":
        assert extension.strip().endswith(".abi3.so")
    assert "serial" in run("-m", "numkong_py", "info")


def load_build_script() -> object:
    specification = importlib.util.spec_from_file_location("ffi_build", ROOT / "numkong_py" / "_ffi_build.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_declarations_are_read_from_the_headers() -> None:
    pytest.importorskip("cffi")
    header = """
    /* a comment; with { braces } */
    #define NK_TWICE_(x) NK_##x \\
        twice
    #define NK_DECLARE_(dtype, output)                     \\
        NK_PUBLIC int nk_a_##dtype##_best(output *result); \\
        NK_PUBLIC int nk_b_##dtype(nk_##dtype##_t x);
    NK_DECLARE_(bf16, float)
    #if defined(X)
    #define NK_OTHER 1
    #endif
    typedef enum nk_e { nk_one_k = 1, } nk_e;
    NK_PUBLIC char const *nk_name(nk_e e); // trailing
    static inline int nk_hidden(void) { return 1; }
    int nk_private(void);
    """
    found = [" ".join(text.split()) for text in load_build_script().declarations(header.replace("\n    ", "\n"))]
    assert found == [
        "int nk_a_bf16_best(float *result);",
        "int nk_b_bf16(nk_bf16_t x);",
        "typedef enum nk_e { nk_one_k = 1, } nk_e;",
        "char const *nk_name(nk_e e);",
    ]


def test_every_public_function_of_the_headers_is_declared() -> None:
    script = load_build_script()
    declared = "\n".join(text for header in script.headers for text in script.declarations(header))
    for header in script.headers:
        for line in header.splitlines():
            if line.startswith("NK_PUBLIC ") and "(" in line:
                name = line[: line.index("(")].split()[-1].lstrip("*")
                assert f"{name}(" in declared
