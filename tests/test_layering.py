"""The house's layering: who may import whom, what an import may touch, and where C may ask for the architecture."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from oracle import ROOT, layout_ids

PACKAGE = ROOT / "numkong_py"
LAYERS = (
    {"dtypes", "errors", "layout", "coded", "_ffi_build"},
    {"arrays", "threads"},
    {"codebook"},
    {"reference", "cpu", "cuda"},
    {"backends", "storage"},
    {"packed", "ops"},
    {"sides"},
    {"neighbours"},
    {"gradient", "chamfer", "corpus", "interop", "two_stage"},
    {"report"},
    {"jax", "distributed", "adapters", "demo", "cli"},
    {"dispatch"},
    {"__init__", "__main__"},
)
LAYER_OF = {module: position for position, layer in enumerate(LAYERS) for module in layer}
ONLY_IMPORTER = {
    "_numkong": ("cpu",),
    "cupy": ("cuda",),
    "jax": ("jax",),
    "jaxlib": ("jax",),
    "dask": ("distributed",),
    "distributed": ("distributed",),
    "fsspec": ("distributed",),
    "torch": (),
}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))


def top(path: Path) -> str:
    """First part of a module's name inside the package: cuda/compile.py is cuda."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> set[tuple[str, bool]]:
    """Modules that a file imports anywhere: (first name, is it of this package)."""
    found: set[tuple[str, bool]] = set()
    folder = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, _, rest = alias.name.partition(".")
                found.add((rest.split(".")[0] or "__init__", True) if first == "numkong_py" else (first, False))
        if isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level:
                parents = folder[: len(folder) - node.level + 1]
                parts = (*parents, *(name.split(".") if name else ()))
            elif name.split(".")[0] == "numkong_py":
                parts = tuple(name.split(".")[1:])
            else:
                found.add((name.split(".")[0], False))
                continue
            found |= {(parts[0], True)} if parts else {(module(alias.name), True) for alias in node.names}
    return found


def module(name: str) -> str:
    """What `from numkong_py import name` takes: a module of the package, or something that __init__ defines."""
    return name if (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir() or name == "_numkong" else "__init__"


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(PACKAGE)) for path in SOURCES])
def test_a_module_imports_only_from_its_left(path: Path) -> None:
    assert top(path) in LAYER_OF, f"{top(path)} has no place in LAYERS"
    for name, inside in imports(path):
        if name in ONLY_IMPORTER:
            assert top(path) in ONLY_IMPORTER[name] or (inside and name != "_numkong"), f"{top(path)} imports {name}"
        if inside and name != "_numkong" and name != top(path):
            assert LAYER_OF[name] <= LAYER_OF[top(path)], f"{top(path)} imports {name}, which is to its right"


def test_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        graph.setdefault(top(path), set()).update(
            name for name, inside in imports(path) if inside and name not in (top(path), "_numkong")
        )
    while graph:
        leaves = {name for name, needs in graph.items() if not needs & set(graph)}
        assert leaves, f"these import each other: {graph}"
        graph = {name: needs for name, needs in graph.items() if name not in leaves}


def run(code: str) -> str:
    """Run code in a fresh interpreter and return what it printed; warnings are errors."""
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_is_light() -> None:
    out = run(
        "import sys, os, threading\n"
        "before = dict(os.environ)\n"
        "import numkong_py\n"
        "heavy = {'cupy', 'jax', 'jaxlib', 'dask', 'distributed', 'torch', 'tensorflow', 'scipy', 'pandas', 'numba'}\n"
        "print(sorted(heavy & set(sys.modules)), threading.active_count(), dict(os.environ) == before)\n"
        "print([fd for fd in os.listdir('/proc/self/fd') if 'nvidia' in os.path.realpath('/proc/self/fd/' + fd)]"
        " if os.path.isdir('/proc/self/fd') else [])"
    )
    assert out == "[] 1 True\n[]\n"


def test_scoring_imports_nothing_heavy_either() -> None:
    out = run(
        "import sys\nimport numpy as np\nimport numkong_py as nk\n"
        "x = np.ones((3, 4), np.float32)\nnk.maxsim(x, [x, x], threads=2)\nnk.topk(x, [x, x], 1)\nnk.backends()\n"
        "print(sorted({'cupy', 'jax', 'dask', 'torch', 'scipy'} & set(sys.modules)))"
    )
    assert out == "[]\n"


def test_floating_point_mode_of_the_process_is_left_alone() -> None:
    out = run(
        "import numpy as np\nimport numkong_py as nk\n"
        "x = np.full((3, 40), 1e-30, np.float32)\n"
        "for row in nk.backends():\n"
        "    if row.device == 'cpu' and row.available:\n"
        "        for dtype in set(row.dtypes) & {'f16', 'f32'}:\n"
        "            p = nk.pack(x.astype({'f16': np.float16, 'f32': np.float32}[dtype]), backend=row.name)\n"
        "            nk.maxsim_packed(p, p)\n"
        "print((np.float32(1e-30) * np.full(40, 1e-12, np.float32) > 0).all(), float(np.float32(1) / 3))"
    )
    assert out == "True 0.3333333432674408\n"


def test_scoring_survives_fork() -> None:
    if not hasattr(sys, "getswitchinterval") or sys.platform == "win32":
        pytest.skip("this platform has no fork")
    out = run(
        "import os, warnings\nimport numpy as np\nimport numkong_py as nk\n"
        "warnings.simplefilter('ignore')\n"
        "x = np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32)\n"
        "documents = [x] * 64\n"
        "before = nk.maxsim(x, documents, threads=4)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if np.array_equal(nk.maxsim(x, documents, threads=4), before) else 1)\n"
        "print(os.waitpid(child, 0)[1], np.array_equal(nk.maxsim(x, documents, threads=4), before))"
    )
    assert out == "0 True\n"


# ------------------------------------------------------------------------------------------------------- C

C_FILES = sorted([*(ROOT / "c").rglob("*.[ch]"), *(ROOT / "c").rglob("*.inc"), *(ROOT / "include").rglob("*.*")])
ARCHITECTURE = re.compile(
    r"^\s*#\s*(?:if|elif|ifdef|ifndef).*(?:NK_BUILD_|__x86_64__|__aarch64__|__AVX|__ARM|__wasm|_M_X64)"
)


def test_only_the_table_the_backends_and_detection_ask_for_the_architecture() -> None:
    allowed = {"capabilities.c", "backends.inc", "backend.h"}
    for path in C_FILES:
        if path.name in allowed or path.parent.name in ("backends", "kernels"):
            continue
        hits = [line for line in path.read_text().splitlines() if ARCHITECTURE.match(line)]
        assert not hits, f"{path.name}: {hits}"


def test_a_backend_includes_no_other_backend_and_has_its_row() -> None:
    files = sorted((ROOT / "c" / "backends").glob("*.c"))
    assert {path.stem for path in files} == set(layout_ids())
    for path in files:
        assert not re.search(r"#\s*include\s+\".*\.c\"", path.read_text()), path.name


GNU_ONLY = re.compile(r"__attribute__|__builtin_|__asm__|__typeof|\btypeof\b|\(\{")
NOT_FOR_MSVC = ("sapphireamx.c", "sme.c", "arm_sme_abi.inc", "v128relaxed.c", "entry.c")  # rows that it does not build


def test_gnu_extensions_stand_where_only_gnu_compilers_read_them() -> None:
    for path in C_FILES:
        if path.name in NOT_FOR_MSVC or path.name.startswith("wasm_") or "xla" in path.name:
            continue
        conditions: list[str] = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            directive = re.match(r"\s*#\s*(if\w*|elif|else|endif)\b(.*)", line)
            if directive and directive[1].startswith("if"):
                conditions.append(directive[2])
            elif directive and directive[1] == "endif":
                conditions.pop()
            elif directive:
                conditions[-1] += directive[2]
            elif GNU_ONLY.search(line):
                guarded = any(re.search("__GNUC__|__clang__|_MSC_VER", condition) for condition in conditions)
                assert guarded, f"{path.name}:{number}: {line.strip()}"
