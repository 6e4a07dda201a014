"""Where and with what a result came about: machine, versions, commit, date."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from contenders import version

import numkong_py as nk

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("numpy", "ml_dtypes", "jax", "jaxlib", "torch", "numkong", "maxsim_cpu", "fast_maxsim")
FLAGS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16", "asimd", "asimddp", "bf16", "sme", "hypervisor"),
)
SOURCES = ("c/**/*", "include/**/*", "numkong_py/**/*.py", "numkong_py/**/*.cu*")


def _cpuinfo(field: str) -> str:
    """First value of a field of /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _cache_sizes() -> dict[str, str]:
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    read = [[(cache / name).read_text().strip() for name in ("level", "type", "size")] for cache in caches]
    return {f"L{level} {kind}": size for level, kind, size in read}


def machine() -> dict[str, Any]:
    """Processor, the extensions that matter, how many cores this process may use, caches, memory."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return {
        "model": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "family": "/".join(_cpuinfo(field) for field in ("cpu family", "model", "stepping")),
        "flags": [flag for flag in FLAGS if flag in flags],
        "capabilities": str(nk.enabled_capabilities()),
        "cores": os.cpu_count(),
        "caches": _cache_sizes(),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit() -> str | None:
    """The commit of the tree, with a plus if the sources differ; NUMKONG_COMMIT where there is no repository."""
    found = _git("rev-parse", "--short=12", "HEAD")
    if found is None:
        return os.environ.get("NUMKONG_COMMIT")
    return found + ("+" if _git("status", "--porcelain", "--", "c", "include", "numkong_py") else "")


def source_digest() -> str:
    """SHA-256 of the sources' names and bytes: the same here and wherever the tree was copied to."""
    digest = hashlib.sha256()
    paths = {path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file() and path.suffix != ".so"}
    for path in sorted(paths):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def stamp(options: dict[str, Any]) -> dict[str, Any]:
    """The first record of a run."""
    now = time.time()
    return {
        "kind": "run",
        "run": f"{int(now):x}-{os.getpid():x}",
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime(now)),
        "commit": commit(),
        "source": source_digest(),
        "version": nk.__version__,
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "versions": {package: found for package in PACKAGES if (found := version(package))},
        "options": options,
    }
