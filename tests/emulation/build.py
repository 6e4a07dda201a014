"""Builds what x86_model.h makes possible: the self-test of the models, and the whole package with modelled rows.

``python tests/emulation/build.py DIRECTORY`` builds the package into DIRECTORY and says how to use it;
``--selftest`` builds and runs the self-test instead; ``--hardware`` runs the self-test's plain C against the processor
itself, on a machine that has AVX-VNNI, AVX-512 BF16 and AMX.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent

#: What the icelake and genoa rows need; a machine with all of it runs them natively.
AVX512_FLAGS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"})
#: What the models themselves are written in.
MODEL_FLAGS = frozenset({"avx2", "fma", "f16c"})
HARDWARE_FLAGS = AVX512_FLAGS | {"avx_vnni", "amx_tile", "amx_int8", "amx_bf16"}


def machine_flags() -> frozenset[str]:
    """Instruction sets that this machine's Linux reports, empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def simde_include() -> Path | None:
    """Folder of SIMDe's headers: the ``simde-py`` package's, or the system's, or None."""
    folders = [Path("/usr/include/simde")]
    try:
        import simde_py

        root = Path(simde_py.get_include())
        folders[:0] = [root, root / "simde"]  # releases differ in which of the two they name
    except ImportError:
        pass
    return next((folder for folder in folders if (folder / "x86" / "avx512.h").is_file()), None)


def compiler() -> list[str]:
    """The command that compiles C here: ``CC``, or gcc."""
    return shlex.split(os.environ.get("CC", "gcc"))


def models_avx512() -> bool:
    """Whether AVX-512 has to be modelled on this machine."""
    return not machine_flags() >= AVX512_FLAGS


def is_x86_linux() -> bool:
    """Whether this is the platform that the models are for."""
    return platform.machine() in ("x86_64", "AMD64") and sys.platform == "linux"


def obstacle() -> str | None:
    """Why nothing can be emulated here, in one sentence, or None."""
    if not is_x86_linux():
        return f"the models are for x86-64 Linux, this is {platform.machine()} {sys.platform}"
    lacking = MODEL_FLAGS - machine_flags()
    if lacking:
        return f"the models are written in AVX2, FMA and F16C, this processor lacks {', '.join(sorted(lacking))}"
    try:
        command = [*compiler(), "-dM", "-E", "-x", "c", "/dev/null"]
        version = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError:
        return f"there is no C compiler ({compiler()[0]}); install gcc"
    if "__clang__" in version.stdout or "__GNUC__" not in version.stdout:
        return f"the models need gcc (target pragmas that SIMDe sees), CC is {compiler()[0]}"
    if models_avx512() and simde_include() is None:
        return "SIMDe's headers are missing: pip install simde-py"
    if importlib.util.find_spec("setuptools") is None:
        return "setuptools is missing, which builds the package: pip install setuptools"
    return None


def model_options() -> list[str]:
    """Compiler options that put the models in place of the instructions; -O1 builds and tests in the least time."""
    options = ["-O1", "-include", str(HERE / "x86_model.h"), f"-I{HERE / 'include'}", "-Wno-psabi"]
    options.append(f"-DNK_MODEL_AVX512={int(models_avx512())}")
    if models_avx512():
        options += ["-isystem", str(simde_include())]
    return options


def run_selftest(hardware: bool) -> subprocess.CompletedProcess[str]:
    """Compile and run selftest.c; the result holds its lines and its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "selftest"
        options = ["-DNK_SELFTEST_HARDWARE"] if hardware else model_options()
        warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
        sources = [str(HERE / "selftest.c"), "-o", str(program), "-lm"]
        subprocess.run(
            [*compiler(), "-std=gnu99", "-O2", "-ffp-contract=off", *warnings, *options, *sources], check=True
        )
        return subprocess.run([str(program)], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def build_package(folder: Path) -> None:
    """Build the package with modelled rows into ``folder``, which then goes on PYTHONPATH; the tree stays as it is."""
    flags = " ".join([os.environ.get("CFLAGS", ""), shlex.join(model_options())]).strip()
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "setup.py", "-q", "build", "--build-base", scratch, "--build-lib", str(folder)]
        environment = {**os.environ, "CFLAGS": flags}
        result = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=environment,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if result.returncode:
        raise RuntimeError(f"{shlex.join(command)} with CFLAGS={flags!r} failed:\n{result.stdout[-4000:]}")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where the package goes")
    parser.add_argument("--selftest", action="store_true", help="build and run the self-test of the models")
    parser.add_argument("--hardware", action="store_true", help="check the self-test against the processor")
    arguments = parser.parse_args()
    if arguments.selftest or arguments.hardware:
        result = run_selftest(arguments.hardware)
        print(result.stdout, end="")
        return result.returncode
    if arguments.folder is None:
        parser.error("name a folder to build into, or --selftest, or --hardware")
    if reason := obstacle():
        print(reason, file=sys.stderr)
        return 1
    build_package(arguments.folder.resolve())
    print(f"PYTHONPATH={arguments.folder.resolve()} python -m numkong_py info")
    return 0


if __name__ == "__main__":
    sys.exit(main())
