"""The AArch64 rows on emulated processors: selection, the conformance suite, what is executed, and faults that show.

The package is the wheel for AArch64, cross-built from this tree. Python is emulated too and slow, so of the conformance
suite each run takes a part, spread over all its tests; ``NUMKONG_WHOLE_EMULATION=1`` runs it whole on every processor.
Faults and counts of instructions use a C program (tests/emulation/row_check.c) that holds a row against serial.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import tools

from numkong_py.cpu import PRECISIONS

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path.insert(0, str(TESTS / "emulation"))

import arm_machine  # noqa: E402 (the folder of the emulation is no package)

pytestmark = pytest.mark.slow

WHOLE = bool(os.environ.get("NUMKONG_WHOLE_EMULATION"))
BY_LENGTH = {length: f"max,sme-default-vector-length={length}" for length in (16, 64, 256)}  # bytes of an SVE vector
#: Tests of a family on each processor, where the suite does not run whole; none: only selection is checked.
SHARES = {"neoverse-n1": 3, BY_LENGTH[64]: 3, BY_LENGTH[16]: 2, BY_LENGTH[256]: 2}
#: Suites that a row runs, the share of each on every processor, and tests in a share of one at least.
SUITES = {"test_conformance.py": (SHARES, 30), "test_coded.py": ({"neoverse-n1": 1, BY_LENGTH[64]: 1}, 5)}
RUNS = [(cpu, suite) for suite, (shares, _) in SUITES.items() for cpu in (arm_machine.CPUS if WHOLE else shares)]
SELECTED = """
import json
import numpy as np
import numkong_py as nk
from numkong_py import reference
rng = np.random.default_rng(0)
query, documents = rng.standard_normal((9, 33)), [rng.standard_normal((n, 33)) for n in (5, 0, 40)]
same = []
for dtype in (np.float32, np.float16):
    sides = query.astype(dtype), [document.astype(dtype) for document in documents]
    same.append(np.array_equal(nk.maxsim(*sides), reference.maxsim(*sides)))
rows = {row.name: row.reason for row in nk.backends() if row.device == "cpu"}
print(json.dumps([nk.__file__, nk.pack(query.astype(np.float32)).backend, rows, same]))
"""


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    """The emulator and the cross compiler run on x86-64 Linux."""
    if (platform.machine(), sys.platform) != ("x86_64", "linux"):
        pytest.skip(f"the emulator is for x86-64 Linux, this is {platform.machine()} {sys.platform}")
    pytest.importorskip("setuptools", reason="setuptools, which builds the wheel, is not installed")
    tools.qemu("aarch64")
    tools.zig()


# --------------------------------------------------------------------------------------------- the Python suite


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for AArch64, installed into a folder."""
    wheel = arm_machine.build_wheel(tmp_path_factory.mktemp("wheel"))
    assert wheel.name.endswith(f"-abi3-{arm_machine.PLATFORM}.whl")
    return arm_machine.install_wheel(wheel, tmp_path_factory.mktemp("site"))


def suite_options(row: str, share: int) -> list[str]:
    """Command line of the conformance suite for a row."""
    part = ["--every", "1"] if WHOLE else ["--at-most", str(share)]
    plugins = ["-p", "sampling", "-p", "answers", "-p", "no:cacheprovider"]
    return ["-m", "pytest", "-q", "--tb=short", *plugins, "--row", row, *part, "--rootdir", str(ROOT)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """The reference's answers to each share of the suites, computed here."""
    wanted = {(suite, share) for suite, (shares, _) in SUITES.items() for share in shares.values()}
    files = {key: tmp_path_factory.mktemp("answers") / "answers.pickle" for key in wanted}
    for (suite, share), file in files.items():
        command = [
            sys.executable,
            *suite_options("serial", share),
            "--record",
            str(file),
            str(TESTS / suite),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS / "emulation")])}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:]
    return files


@pytest.mark.parametrize(("cpu", "row"), arm_machine.CPUS.items(), ids=arm_machine.CPUS)
def test_the_processor_chooses_its_row(cpu: str, row: str, package: Path) -> None:
    done = arm_machine.run(cpu, package, "-c", SELECTED)
    assert done.returncode == 0, done.stdout
    file, chosen, reasons, same = json.loads(done.stdout.splitlines()[-1])
    assert Path(file).is_relative_to(package), "the wheel was not imported"
    assert chosen == row and all(same)
    assert len(reasons) == 9
    available = [name for name, reason in reasons.items() if reason is None]
    assert available == ["sme", "neonsdot", "serial"][["sme", "neonsdot", "serial"].index(row) :]
    assert sum(reason == "not this architecture" for reason in reasons.values()) == 6


@pytest.mark.parametrize(("cpu", "suite"), RUNS)
def test_conformance(cpu: str, suite: str, package: Path, answers: dict[tuple[str, int], Path]) -> None:
    (shares, least), row = SUITES[suite], arm_machine.CPUS[cpu]
    share = shares.get(cpu, max(shares.values()))
    replay = ["--replay", answers[suite, share]]
    done = arm_machine.run(cpu, package, *suite_options(row, share), *replay, TESTS / suite)
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= least * share, done.stdout[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1], "a test of an available row was skipped"


# ------------------------------------------------------------------------------------------------ the C program

SOURCES = (
    *("c/backend.c", "c/packed.c", "c/maxsim.c", "c/gradient.c", "c/capabilities.c", "c/backends/serial.c"),
    *("c/backends/neonsdot.c", "c/backends/sme.c", "tests/emulation/row_check.c"),
)
FLAGS = ("-O1", "-std=c99", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fno-pie")


def compile_object(tree: Path, source: str, folder: Path) -> None:
    """Compile one source of a tree; its headers and includes are the tree's."""
    target = folder / f"{Path(source).name}.o"
    command = [*arm_machine.compiler(), *FLAGS, f"-I{tree / 'include'}", "-c", str(tree / source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def link(folder: Path) -> Path:
    """Put the objects of a folder together, at fixed addresses."""
    objects = sorted(str(path) for path in folder.glob("*.o"))
    command = [*arm_machine.compiler(), "-no-pie", *objects, "-lm", "-o", str(folder / "row_check")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "row_check"


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Objects and program of the sources as they are, without a warning."""
    folder = tmp_path_factory.mktemp("objects")
    for source in SOURCES:
        compile_object(ROOT, source, folder)
    link(folder)
    return folder


def emulate(
    cpu: str, program: Path, *arguments: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the program on a processor."""
    root = str(arm_machine.interpreter())
    command = [tools.qemu("aarch64"), "-cpu", cpu, "-L", root, *options, str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("cpu", ["neoverse-n1", *(f"max,sme-default-vector-length={n}" for n in (32, 128))])
@pytest.mark.parametrize("precision", [PRECISIONS[name] for name in ("exact", "int8", "fp8", "binary")])
def test_a_row_is_serial_bit_for_bit(cpu: str, precision: int, objects: Path) -> None:
    done = emulate(cpu, objects / "row_check", "same", "neonsdot" if cpu == "neoverse-n1" else "sme", str(precision))
    assert done.returncode == 0 and "0 of 54 differ" in done.stdout, done.stdout + done.stderr


def test_a_row_that_the_processor_lacks_does_not_run(objects: Path) -> None:
    for cpu, row in (("cortex-a53", "neonsdot"), ("neoverse-n1", "sme"), ("max,sme=off", "sme")):
        done = emulate(cpu, objects / "row_check", "same", row)
        assert done.returncode == 2 and "not available" in done.stderr


@dataclass(frozen=True)
class Fault:
    """One fault: in `file`, `old`, which is there once, becomes `new`; it must show in `row` on `cpu`."""

    name: str
    row: str
    cpu: str
    file: str
    old: str
    new: str


FIRST_INDEX = ("c/scoring.inc", "? index < best->index :", "? index > best->index :")
FAULTS = (
    Fault("first index: neonsdot", "neonsdot", "neoverse-n1", *FIRST_INDEX),
    Fault("first index: sme", "sme", BY_LENGTH[64], *FIRST_INDEX),
    Fault(
        "mask of a tile in a joined vector",
        "sme",
        BY_LENGTH[256],
        "c/backends/sme.c",
        "svld1_s8(lanes, from)",
        "svld1_s8(svorr_z(svptrue_b8(), lanes, svptrue_b8()), from)",
    ),
    Fault(
        "rows of the second query vector",
        "sme",
        BY_LENGTH[16],
        "c/backends/sme.c",
        "rows > 1 ? row + 1 : row",
        "row",
    ),
    Fault(
        "the depth tail",
        "neonsdot",
        "neoverse-n1",
        "c/kernels/arm_neon.inc",
        "if (k != depth) {\n        nk_f32_t tail[16];",
        "if (0) {\n        nk_f32_t tail[16];",
    ),
    Fault(
        "the last tokens of a document",
        "neonsdot",
        "neoverse-n1",
        "c/kernels/arm_neon.inc",
        "nk_load_values_(values + token, count - token, value)",
        "nk_load_values_(values + token, count - token - 1, value)",
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_shows(fault: Fault, objects: Path, tmp_path: Path) -> None:
    tree, folder = tmp_path / "tree", tmp_path / "objects"
    for part in ("c", "include"):
        shutil.copytree(ROOT / part, tree / part)
    shutil.copytree(objects, folder)
    text = (tree / fault.file).read_text()
    assert text.count(fault.old) == 1, f"{fault.old!r} is {text.count(fault.old)} times in {fault.file}"
    (tree / fault.file).write_text(text.replace(fault.old, fault.new))
    compile_object(tree, f"c/backends/{fault.row}.c", folder)
    done = emulate(fault.cpu, link(folder), "same", fault.row)
    assert done.returncode != 0, f"the fault does not show: {done.stdout}"


# ------------------------------------------------------------------------------------------- what is executed

#: Instructions by the bits that say what they are (Arm ARM, A64 encodings): name, mask, value.
INSTRUCTIONS = (
    ("sdot", 0xFFC0F400, 0x4F80E000),  # SDOT (by element), 128 bits
    ("fmla", 0xFFC0F400, 0x4F801000),  # FMLA (by element), f32, 128 bits
    ("smopa", 0xFFE0001C, 0xA0800000),
    ("fmopa", 0xFFE0001C, 0x80800000),
    ("bfmopa", 0xFFE0001C, 0x81800000),
    ("smstart", 0xFFFFFFFF, 0xD503437F),  # SMSTART SM
    ("smstart", 0xFFFFFFFF, 0xD503477F),  # SMSTART
)


def symbols(image: bytes) -> list[tuple[str, int, int]]:
    """Names, addresses and sizes of an ELF64 program's functions."""
    (at,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, at + size * index) for index in range(count)]
    found = []
    for section in sections:
        if section[1] != 2:  # SHT_SYMTAB
            continue
        names = sections[section[6]][4]
        for entry in range(section[4], section[4] + section[5], 24):
            name, kind, _, _, address, length = struct.unpack_from("<IBBHQQ", image, entry)
            if kind & 15 == 2:
                found.append((image[names + name : image.index(b"\0", names + name)].decode(), address, length))
    return found


def words_at(image: bytes) -> dict[int, int]:
    """Instruction words of an ELF64 program by address."""
    (at,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    words = {}
    for index in range(count):
        kind, flags, offset, address, _, length = struct.unpack_from("<IIQQQQ", image, at + size * index)
        if kind == 1 and flags & 1:  # PT_LOAD, executable
            usable = length // 4 * 4
            values = struct.unpack_from(f"<{usable // 4}I", image, offset)
            words.update(zip(range(address, address + usable, 4), values))
    return words


def name_of(word: int) -> str | None:
    """Name of an instruction of the table."""
    return next((name for name, mask, value in INSTRUCTIONS if word & mask == value), None)


def executed(cpu: str, objects: Path, tmp_path: Path, functions: tuple[str, ...], *work: str) -> Counter[str]:
    """How often the functions executed each instruction of the table: qemu logs every one (``-one-insn-per-tb``)."""
    image = (objects / "row_check").read_bytes()
    ranges = [f"{address:#x}+{length:#x}" for name, address, length in symbols(image) if name in functions]
    assert ranges, f"none of {functions} is a function of the program"
    log = tmp_path / "log"
    options = ("-one-insn-per-tb", "-d", "exec,nochain", "-dfilter", ",".join(ranges), "-D", str(log))
    done = emulate(cpu, objects / "row_check", "work", *work, options=options)
    assert done.returncode == 0, done.stderr
    words = words_at(image)
    addresses = (
        int(address, 16) for address in re.findall(r"^Trace .*?\[[0-9a-f]+/([0-9a-f]+)/", log.read_text(), re.M)
    )
    return Counter(filter(None, (name_of(words[address]) for address in addresses)))


@pytest.mark.parametrize(
    ("length", "shape"), [(16, (32, 64, 96)), (64, (32, 700, 128)), (64, (9, 300, 50)), (256, (32, 700, 128))]
)
def test_outer_products_are_as_few_as_the_shape_allows(
    length: int, shape: tuple[int, int, int], objects: Path, tmp_path: Path
) -> None:
    queries, documents, depth = shape
    counts = executed(BY_LENGTH[length], objects, tmp_path, ("nk_outer_products_",), "sme", "f32", *map(str, shape))
    least = math.ceil(4 * queries / length) * math.ceil(4 * documents / length) * math.ceil(depth / 4)
    rate = counts["smopa"] * 1e6 / (queries * documents * depth)
    print(f"{counts['smopa']} SMOPA, {rate:.0f} per 1M MACs; least {least}")
    assert least <= counts["smopa"] <= 1.1 * least
    assert counts["smstart"] == 1, "streaming mode is entered once per call"


@pytest.mark.parametrize(
    ("dtype", "instruction", "words"), [("f32", "fmopa", 64), ("f16", "fmopa", 64), ("bf16", "bfmopa", 32)]
)
def test_the_second_screen_multiplies_outer_products(
    dtype: str, instruction: str, words: int, objects: Path, tmp_path: Path
) -> None:
    work = ("sme", dtype, "32", "96", "-64")
    counts = executed(BY_LENGTH[64], objects, tmp_path, ("nk_outer_products_",), *work)
    assert counts[instruction] == 2 * 6 * words, counts
    assert counts["smopa"] == 2 * 6 * 16 and counts["smstart"] == 2


def test_neonsdot_multiplies_by_element(objects: Path, tmp_path: Path) -> None:
    work = ("neonsdot", "f32", "32", "96", "-64")
    counts = executed("neoverse-n1", objects, tmp_path, ("nk_screen_", "nk_direct_"), *work)
    assert counts["sdot"] == 32 * 96 * 64 // 16, "16 products per instruction"
    assert counts["fmla"] == 32 * 96 * 64 // 4


# -------------------------------------------------------------------------------------------------- other systems


COMPILED = {
    "x86_64-linux-gnu.2.28": ("haswell", "alder", "icelake", "genoa", "sapphireamx"),
    "x86_64-windows-gnu": ("haswell",),
    "aarch64-macos": ("neonsdot", "sme"),
    "aarch64-windows-gnu": ("neonsdot",),
}


@pytest.mark.parametrize("target", COMPILED)
def test_clang_compiles_rows_for_other_systems(target: str, tmp_path: Path) -> None:
    rows = [f"backends/{row}" for row in COMPILED[target]]
    flags = ["-O0", "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-ffp-contract=off"]
    for name in ("capabilities", "backend", *rows):
        source = [f"-I{ROOT / 'include'}", "-c", str(ROOT / "c" / f"{name}.c"), "-o", str(tmp_path / "object")]
        command = [*tools.zig(), "-target", target, *flags, *source]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
