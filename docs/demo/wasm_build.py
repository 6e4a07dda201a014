"""Compiles the WebAssembly modules: the C sources, for hosts that are browsers, Node or wasmtime."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Module name to the options that set it apart. An engine refuses a module that has an instruction it does not know, so
#: there is one module with the row and one without.
MODULES = {
    "numkong-relaxed.wasm": ("-msimd128", "-mrelaxed-simd"),
    "numkong.wasm": ("-DNK_ONLY_SERIAL",),
}
TARGET = ("-target", "wasm32-wasi", "-O2")
CFLAGS = ("-std=c99", "-ffp-contract=off", "-Wall", "-Wextra", "-Wpedantic", "-Werror")


def compile_objects(
    folder: Path, compiler: Sequence[str], options: Sequence[str], tree: Path = ROOT
) -> dict[str, Path]:
    """Compile the C files of a tree that a module is made of: their names in the tree, and the objects."""
    found = sorted(path for part in ("c", "c/wasm", "c/backends") for path in (tree / part).glob("*.c"))
    names = [path.relative_to(tree).as_posix() for path in found]
    return {name: compile_object(name, folder, compiler, options, tree) for name in names}


def compile_object(name: str, folder: Path, compiler: Sequence[str], options: Sequence[str], tree: Path = ROOT) -> Path:
    """Compile one file of a tree into `folder`."""
    target = folder / f"{Path(name).stem}.o"
    include = (f"-I{tree / 'include'}", f"-I{tree / 'c'}")
    command = [*compiler, *TARGET, *CFLAGS, *options, *include, "-c", str(tree / name), "-o", str(target)]
    subprocess.run(command, check=True, timeout=600)
    return target


def link(objects: Iterable[Path], module: Path, compiler: Sequence[str]) -> None:
    """Put objects together as a module; the options of the objects stay out, so the C library is built once for all."""
    command = [
        *compiler,
        *TARGET,
        "-mexec-model=reactor",
        "-s",
        "-Wl,-z,stack-size=131072",
        *map(str, objects),
        "-o",
        str(module),
    ]
    subprocess.run(command, check=True, timeout=600)


def build_modules(folder: Path, compiler: Sequence[str]) -> None:
    """Compile both modules into `folder`."""
    for name, options in MODULES.items():
        with tempfile.TemporaryDirectory() as scratch:
            link(compile_objects(Path(scratch), compiler, options).values(), folder / name, compiler)
