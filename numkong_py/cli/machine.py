"""Commands about the machine: `info`, and the demo."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from typing import Any

from ..backends import backends
from ..cpu import compiled_capabilities, detected_capabilities, enabled_capabilities

__all__ = ["print_demo", "print_info", "run_demo", "run_info"]

LIBRARIES = (
    "numpy",
    "ml_dtypes",
    "cffi",
    "jax",
    "jaxlib",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "torch",
    "dask",
    "safetensors",
    "xxhash",
)


def _library_versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def run_info(arguments: argparse.Namespace) -> dict[str, Any]:
    """What this machine, this build and the environment let run."""
    rows = backends()
    return {
        "numkong_py": sys.modules[__package__.partition(".")[0]].__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "processors": os.cpu_count(),
        "capabilities": {
            "detected": str(detected_capabilities()).split(),
            "compiled": str(compiled_capabilities()).split(),
            "enabled": str(enabled_capabilities()).split(),
        },
        "backends": [
            {
                "name": row.name,
                "device": row.device,
                "dtypes": list(row.dtypes),
                "required": str(row.required).split(),
                "available": row.available,
                "reason": row.reason,
            }
            for row in rows
        ],
        "devices": sorted({row.device for row in rows if row.available}),
        "libraries": _library_versions(),
    }


def print_info(facts: dict[str, Any]) -> None:
    """Show what `run_info` found."""
    print(f"numkong_py {facts['numkong_py']}, Python {facts['python']}, {facts['system']} {facts['machine']}")
    print(f"processors: {facts['processors']}; devices: {' '.join(facts['devices'])}")
    for kind, names in facts["capabilities"].items():
        print(f"{kind:<9} {' '.join(names)}")
    print("\nrow          device  types         state")
    for row in facts["backends"]:
        state = "available" if row["available"] else f"no: {row['reason']}"
        print(f"{row['name']:<12} {row['device']:<7} {' '.join(row['dtypes']):<13} {state}")
    print("\n" + ", ".join(f"{name} {version}" for name, version in facts["libraries"].items()))


def run_demo(arguments: argparse.Namespace) -> Any:
    """Answer questions from the demo's corpus."""
    from .. import demo

    report = demo.run(arguments.question, arguments.k, backend=arguments.backend, threads=arguments.threads)
    return report.to_dict() if arguments.json else report


def print_demo(report: Any) -> None:
    """Show the answers."""
    from .. import demo

    print(demo.render(report))
