"""An AArch64 machine for the tests: the package cross-built as a wheel, and a Python that runs it under qemu.

``python tests/emulation/arm_machine.py CPU ARGUMENTS...`` runs that Python with any arguments, for instance
``max,sme=off -m numkong_py info`` or ``max,sme-default-vector-length=16 -m pytest tests/test_conformance.py``.
Everything comes from package registries into a cache (tests/tools.py); nothing is installed into the machine.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
REPOSITORY = TESTS.parent
sys.path.insert(0, str(TESTS))

import tools  # noqa: E402 (the folder of the tests is no package)

GLIBC = "2.28"  # of manylinux_2_28, which NumPy's wheels need as well
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_aarch64"
PYTHON = "3.11"  # of Debian bookworm
INTERPRETER = (
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libexpat1", "zlib1g", "libssl3"),
    *("libffi8", "libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1", "libstdc++6", "libgcc-s1"),
)
REQUIREMENTS = ("numpy", "cffi", "ml_dtypes", "tqdm", "xxhash", "pytest", "hypothesis")
SOURCES = ("c", "include", "numkong_py", "setup.py", "pyproject.toml", "README.md", "LICENSE")

#: Processors that the suite runs on, and the rows that each must choose.
CPUS = {
    "cortex-a53": "serial",
    "neoverse-n1": "neonsdot",
    "max,sme=off": "neonsdot",
    "max,sme-default-vector-length=16": "sme",
    "max,sme-default-vector-length=64": "sme",
    "max,sme-default-vector-length=256": "sme",
}


def compiler() -> list[str]:
    """The command of the cross compiler."""
    return [*tools.zig(), "-target", f"aarch64-linux-gnu.{GLIBC}"]


def copy_sources(folder: Path) -> Path:
    """The package's sources without anything built, in a folder of their own, where building harms nobody."""
    ignore = shutil.ignore_patterns("*.so", "*.pyd", "_numkong.c", "__pycache__")
    for name in SOURCES:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            shutil.copy(source, folder / name)
    return folder


def build_wheel(folder: Path) -> Path:
    """Cross-build the wheel for AArch64 into a folder, with the sources of this tree."""
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("CFLAGS", "LDFLAGS")},
        "CC": shlex.join(compiler()),
        "LDSHARED": shlex.join([*compiler(), "-shared"]),
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
    }
    with tempfile.TemporaryDirectory() as scratch:
        tree = copy_sources(Path(scratch))
        command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--plat-name", PLATFORM, "--dist-dir", str(folder)]
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stdout[-4000:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_wheel(wheel: Path, folder: Path) -> Path:
    """Unpack a wheel: all that installing one into a folder of its own comes to."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def interpreter() -> Path:
    """Root of Debian's Python for AArch64."""
    return tools.debian_packages("python-aarch64", *INTERPRETER, suite="bookworm", architecture="arm64")


def packages() -> Path:
    """What the package and its tests import, as wheels for AArch64."""
    platforms = ["--platform", PLATFORM, "--platform", "manylinux2014_aarch64", "--platform", "any"]
    return tools.pip_packages(
        "site-aarch64", *platforms, "--python-version", PYTHON, "--only-binary=:all:", *REQUIREMENTS
    )


def command(cpu: str, *arguments: str | Path) -> list[str]:
    """Command line of the emulated Python."""
    root = interpreter()
    program = root / "usr" / "bin" / f"python{PYTHON}"
    return [tools.qemu("aarch64"), "-cpu", cpu, "-L", str(root), str(program), *map(str, arguments)]


def environment(*paths: Path) -> dict[str, str]:
    """Environment of the emulated Python: paths before the packages, and no trace of the host's."""
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "TMPDIR", "CI")}
    path = os.pathsep.join(map(str, (*paths, packages())))
    cache = str(tools.CACHE / "bytecode-aarch64")  # compiling all that is imported takes seconds under emulation
    return {**kept, "PYTHONPATH": path, "PYTHONPYCACHEPREFIX": cache, "OPENBLAS_NUM_THREADS": "1", "PATH": "/usr/bin"}


def run(cpu: str, package: Path, *arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the emulated Python on an installed wheel."""
    settings = {"check": False, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    return subprocess.run(
        command(cpu, *arguments), env=environment(package, TESTS, TESTS / "emulation"), cwd=package, **settings
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command line."""
    if len(arguments) < 2:
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build_wheel(Path(scratch) / "wheel")
        package = install_wheel(wheel, Path(scratch) / "site")
        return run(arguments[0], package, *arguments[1:], stdout=None, stderr=None).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
