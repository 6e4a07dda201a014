"""Faults put into a copy of the sources, one at a time: the suite must go red for each, and be green without.

Every mutation is a text that must occur exactly once in its file. When the sources move on and it no longer does, the
test fails: change the mutation with the code.
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from oracle import ROOT
from test_coded import cases as coded_cases
from test_conformance import ROWS, cases

pytestmark = pytest.mark.slow

ROW = "haswell"  # the row with every step that can go wrong: screening, tails, refinement
ROW_FILES = (f"c/backends/{ROW}.c", "c/backends/serial.c")
FLAGS = ("-O0", "-std=c99", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-w")


@dataclass(frozen=True)
class Mutation:
    """One fault: in `file`, `old` becomes `new`."""

    name: str
    file: str
    old: str
    new: str


MUTATIONS = (
    Mutation(
        "the screening bound loses its correction",
        "c/screening.inc",
        "nk_f32_t const bound = nk_bound_of_(document->residual, residual_weight, document->reach, reach_weight);",
        "nk_f32_t const bound = 0;",
    ),
    Mutation(
        "the second screen trusts its sums",
        "c/screening.inc",
        "bound, floor, scorer->list)",
        "0 * bound, floor, scorer->list)",
    ),
    Mutation(
        "f32 dots are trusted",
        "c/screening.inc",
        "nk_f32_t const bound = nk_direct_bound_(scorer, query,",
        "nk_f32_t const bound = 0 * nk_direct_bound_(scorer, query,",
    ),
    Mutation(
        "centred codes are held against exact values",
        "c/screening.inc",
        "if (!document->centred) return",
        "return",
    ),
    Mutation(
        "the floor of top-k is held against values without their bound",
        "c/screening.inc",
        "upper += (largest + bound) * chunk->scale[query];",
        "upper += largest * chunk->scale[query];",
    ),
    Mutation(
        "residuals of the quantisation are forgotten",
        "c/packing.inc",
        "residual = nk_round_up_(nk_quantise_row_(",
        "residual = 0 * nk_round_up_(nk_quantise_row_(",
    ),
    Mutation(
        "bounds of codes forget what the codes leave over",
        "c/coding.inc",
        "token.residual = nk_round_up_(nk_quantise_row_(",
        "token.residual = 0 * nk_round_up_(nk_quantise_row_(",
    ),
    Mutation(
        "the best of codes is not the first of equals",
        "c/coded.inc",
        "return scorer->list[0];",
        "return scorer->list[0] + 1;",
    ),
    Mutation(
        "the last values of a coded document are not looked at",
        "c/kernels/x86_v3.inc",
        "best0 = _mm256_max_ps(best0, nk_load_values_(values + token, count - token));",
        "best0 = _mm256_max_ps(best0, nk_load_values_(values + token, count - token - 1));",
    ),
    Mutation("coded queries keep codes that saturate", f"c/backends/{ROW}.c", "QUERY_LIMIT_ 63", "QUERY_LIMIT_ 127"),
    Mutation("a tie goes to the highest token", "c/scoring.inc", "? index < best->index :", "? index > best->index :"),
    Mutation("NaN loses", "c/scoring.inc", "int const nan = value != value,", "int const nan = 0,"),
    Mutation("an empty document scores 0", "c/scoring.inc", "(nk_f64_t)INFINITY : -(nk_f64_t)INFINITY;", "0.0 : 0.0;"),
    Mutation(
        "sums are float32",
        "c/scoring.inc",
        "unit->sums[set * columns + column] += value;",
        "unit->sums[set * columns + column] = (nk_f32_t)(unit->sums[set * columns + column] + value);",
    ),
    Mutation(
        "the depth tail is dropped",
        "c/kernels/x86_v3.inc",
        "if (k != depth) {\n        nk_f32_t tail[16];",
        "if (0) {\n        nk_f32_t tail[16];",
    ),
    Mutation(
        "lanes are folded in another order",
        "c/kernels/x86_v3.inc",
        "_mm256_add_pd(_mm256_add_pd(lanes0, lanes8), _mm256_add_pd(lanes4, lanes12))",
        "_mm256_add_pd(_mm256_add_pd(lanes0, lanes4), _mm256_add_pd(lanes8, lanes12))",
    ),
    Mutation(
        "a lane's second best is forgotten",
        "c/kernels/x86_v3.inc",
        "leaders->second = _mm256_cvtss_f32(nk_spread_largest_(_mm256_max_ps(lanes0.second, lanes8.second)));",
        "leaders->second = -(nk_f32_t)INFINITY;",
    ),
    Mutation(
        "the last token of a document is not scanned",
        "c/kernels/x86_v3.inc",
        "nk_largest_of_rest_(values + token, count - token), index0",
        "nk_largest_of_rest_(values + token, count - token - 1), index0",
    ),
    Mutation(
        "strides of elements are ignored",
        "c/packing.inc",
        "if (element_stride == (nk_i64_t)element_bytes) {",
        "if (1) {",
    ),
    Mutation(
        "another row's buffer is taken",
        "c/maxsim.c",
        "return header->layout == backend->layout && header->dtype",
        "return header->dtype",
    ),
    Mutation(
        "threads write over one another",
        "numkong_py/cpu.py",
        "skipped = first_query * whole.score_stride + first\n",
        "skipped = first_query * whole.score_stride\n",
    ),
    Mutation(
        "the bound forgets the sum's roundings",
        "c/scoring.inc",
        "((depth + 1) * 0x1p-53 + count * 0x1p-53)",
        "((depth + 1) * 0x1p-53)",
    ),
    Mutation(
        "padding counts as tokens",
        "numkong_py/arrays.py",
        "else _read_lengths(lengths, count, longest)",
        "else np.full(count, longest)",
    ),
)


CODED_TESTS = (
    *(f"test_same_bits_as_the_reference[{precision}-{case}-{ROW}]" for precision, case in coded_cases()[::9]),
    f"test_a_pair_scores_the_same_in_any_company[{ROW}-f32-int8]",
)


def need_a_compiler() -> None:
    """Skip with the reason where the copy cannot be built or run."""
    if not ROWS[ROW].available:
        pytest.skip(f"{ROW}: {ROWS[ROW].reason}")
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler (cc) on this machine")


def compile_object(tree: Path, source: str, *include: str) -> None:
    """Compile one file of a tree next to it."""
    includes = [f"-I{tree / folder}" for folder in ("include", "c")]
    command = ["cc", *FLAGS, *includes, *include, "-c", source, "-o", f"{source}.o"]
    subprocess.run(command, cwd=tree, check=True, timeout=120)


def link(tree: Path) -> None:
    """Put the objects of a tree together as the extension."""
    objects = sorted(str(path.relative_to(tree)) for path in tree.rglob("*.c.o"))
    extension = f"numkong_py/_numkong{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(["cc", "-shared", *objects, "-lm", "-o", extension], cwd=tree, check=True, timeout=120)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The sources with the rows that are needed, compiled, and found green: only then does red mean anything."""
    need_a_compiler()
    tree = tmp_path_factory.mktemp("original")
    for folder in ("c", "include"):
        shutil.copytree(ROOT / folder, tree / folder)
    keep = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__", "emulation", "demo")
    for folder in ("numkong_py", "tests"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=keep)
    shutil.copy(ROOT / "pyproject.toml", tree)
    rows = {Path(file).stem for file in ROW_FILES}
    table = tree / "include" / "numkong" / "backends.inc"
    lines = table.read_text().splitlines()
    dropped = [line for line in lines if line.startswith("NK_BACKEND(") and line[11:].split(",")[0] not in rows]
    table.write_text("\n".join(line for line in lines if line not in dropped) + "\n")
    runpy.run_path(str(tree / "numkong_py" / "_ffi_build.py"))["ffibuilder"].emit_c_code(str(tree / "_numkong.c"))
    compile_object(tree, "_numkong.c", f"-I{sysconfig.get_path('include')}")
    for source in (*(str(path.relative_to(tree)) for path in (tree / "c").glob("*.c")), *ROW_FILES):
        compile_object(tree, source)
    link(tree)
    result = suite_result(tree)
    assert result.returncode == 0, f"red without a fault: {result.stdout[-4000:]}{result.stderr[-1000:]}"
    yield tree
    shutil.rmtree(tree, ignore_errors=True)


def suite_result(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run the chosen part of the suite against the package in a tree, stopping at the first failure."""
    chosen = [f"tests/test_conformance.py::test_same_bits_as_the_reference[{case}-{ROW}]" for case in cases()[::7]]
    chosen += [f"tests/test_coded.py::{name}" for name in CODED_TESTS]
    chosen += [
        f"tests/test_conformance.py::test_strides_change_no_bit[{ROW}-f32-stepped]",
        f"tests/test_conformance.py::test_nan_stays_where_it_is[{ROW}-f32]",
        f"tests/test_conformance.py::test_threads_change_no_bit[{ROW}-f32]",
        f"tests/test_conformance.py::test_copies_that_only_exact_values_tell_apart[{ROW}-f32]",
        f"tests/test_conformance.py::test_documents_whose_tokens_differ_in_scale[dot-{ROW}-f32]",
        f"tests/test_conformance.py::test_what_cannot_reach_the_floor_is_left_out[{ROW}-f32-dot]",
        "tests/test_capi.py::test_mixing_rows_dtypes_depths_and_counts",
    ]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *chosen]
    environment = {"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_a_fault_turns_the_suite_red(mutation: Mutation, original: Path, tmp_path: Path) -> None:
    tree = tmp_path / "mutant"
    shutil.copytree(original, tree)
    file = tree / mutation.file
    text = file.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.old!r} is {text.count(mutation.old)} times in {mutation.file}"
    file.write_text(text.replace(mutation.old, mutation.new))
    if file.suffix == ".c":
        compile_object(tree, mutation.file)
    if file.suffix == ".inc":
        compile_object(tree, ROW_FILES[0])
    link(tree)
    result = suite_result(tree)
    assert result.returncode == 1, f"not noticed: {result.stdout[-2000:]}{result.stderr[-2000:]}"
    assert " failed" in result.stdout, result.stdout[-2000:]
    shutil.rmtree(tree)
