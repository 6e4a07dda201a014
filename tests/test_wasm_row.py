"""The WebAssembly row, in wasmtime and in Node: the bits of the reference, whatever an engine makes of relaxed SIMD.

wasmtime runs it twice: as the engine thinks fastest here, and with the one meaning that the proposal calls
deterministic. Node runs it behind the JavaScript face. Both are installed by tests/tools.py.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tools
from oracle import DTYPES, METRICS, ROOT, assert_same_bits, assert_same_result, layout_ids, tokens
from test_conformance import EVERYTHING, Case, assert_bounds_follow_the_formula, cases, inputs, read, same_codes

import numkong_py as nk
from numkong_py import reference
from numkong_py.cpu import PRECISIONS

sys.path.insert(0, str(ROOT / "docs" / "demo"))

import wasm_build

pytestmark = pytest.mark.slow

ENGINES = ("relaxed", "deterministic", "plain")
ROW = {"relaxed": "v128relaxed", "deterministic": "v128relaxed", "plain": "serial"}
RELAXED, PLAIN = wasm_build.MODULES
CASES = cases()[::5]


@dataclass(frozen=True)
class Built:
    """A folder with both modules, and the objects of the one with the row."""

    folder: Path
    objects: dict[str, Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("wasm")
    (folder / "objects").mkdir()
    wasm_build.build_modules(folder, tools.zig())
    return Built(folder, wasm_build.compile_objects(folder / "objects", tools.zig(), wasm_build.MODULES[RELAXED]))


def start(path: Path, engine: str = "relaxed") -> Any:
    """An instance of a module in wasmtime."""
    tools.wasmtime()
    from wasm_host import Module

    return Module(path, deterministic=engine == "deterministic")


@pytest.fixture(scope="module")
def modules(built: Built) -> dict[str, Any]:
    """One instance for every engine."""
    return {engine: start(built.folder / (PLAIN if engine == "plain" else RELAXED), engine) for engine in ENGINES}


def sides(case: Case) -> tuple[reference.Sets, reference.Sets]:
    """Query sets and documents of a case; every case scores all of them against all."""
    queries, documents, _ = inputs(case)
    return read(queries), read(documents)


@functools.cache
def expected(case: Case) -> Any:
    """What the reference says, always with the axis of the query sets."""
    queries, documents = sides(case)
    options = {"metric": case.metric, "reduction": case.reduction}
    result = reference.maxsim(queries, documents, **options, **EVERYTHING)
    return type(result)(*(array[None] for array in result)) if queries.single else result


def run(module: Any, case: Case, row: str | None = None) -> Any:
    """Pack both sides of a case in a module and score them."""
    packed = [module.pack(side.tokens, side.offsets, case.dtype, row=row) for side in sides(case)]
    result = module.score(*packed, metric=case.metric, reduction=case.reduction)
    module.release(*(side.address for side in packed))
    return result


# --------------------------------------------------------------------------------------------- wasmtime


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_bits_as_the_reference(case: Case, modules: dict[str, Any]) -> None:
    wanted = expected(case)
    for engine, module in modules.items():
        assert module.row(case.dtype) == ROW[engine]
        actual = run(module, case)
        assert_same_result(actual, wanted)
        assert_bounds_follow_the_formula(actual.bounds, wanted.bounds)


@pytest.fixture(scope="module")
def row_check(built: Built) -> Path:
    """The program that holds a row against serial, as a WASI command."""
    source, compiler = "tests/emulation/row_check.c", tools.zig()
    program = wasm_build.compile_object(source, built.folder, compiler, wasm_build.MODULES[RELAXED])
    objects = [path for name, path in built.objects.items() if not name.startswith("c/wasm/")]
    command = [*compiler, *wasm_build.TARGET, *map(str, objects), str(program), "-o", str(built.folder / "check.wasm")]
    subprocess.run(command, check=True, timeout=600)
    return built.folder / "check.wasm"


def wasi_status(program: Path, arguments: list[str], deterministic: bool) -> int:
    """Run a WASI command in wasmtime; its exit status."""
    tools.wasmtime()
    import wasmtime

    config, wasi = wasmtime.Config(), wasmtime.WasiConfig()
    config.wasm_relaxed_simd = True
    config.wasm_relaxed_simd_deterministic = deterministic
    wasi.argv = [program.name, *arguments]
    wasi.inherit_stderr()
    engine = wasmtime.Engine(config)
    store, linker = wasmtime.Store(engine), wasmtime.Linker(engine)
    linker.define_wasi()
    store.set_wasi(wasi)
    instance = linker.instantiate(store, wasmtime.Module.from_file(engine, str(program)))
    try:
        instance.exports(store)["_start"](store)
    except wasmtime.ExitTrap as ended:
        return ended.code
    return 0


@pytest.mark.parametrize(
    ("precision", "engine"), [("int8", "relaxed"), ("int8", "deterministic"), ("fp8", "deterministic")]
)
def test_coded_packings_are_those_of_serial(precision: str, engine: str, row_check: Path) -> None:
    """Scores of codes are serial's to the bit; of fp8, where multiply-adds are sure to fuse."""
    arguments = ["same", "v128relaxed", str(PRECISIONS[precision])]
    assert wasi_status(row_check, arguments, engine == "deterministic") == 0


def extreme_codes(dtype: str, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens whose codes all have the largest magnitude, and near-ties among them: pair sums as large as they get."""
    rng = np.random.default_rng(depth)
    query = rng.choice([-1.0, 1.0], (7, depth))
    document = np.concatenate([np.ones((9, depth)), -np.ones((9, depth)), rng.choice([-1.0, 1.0], (40, depth))])
    document[::3, 0] *= 0.96875
    return query.astype(DTYPES[dtype]), document.astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_that_only_exact_values_tell_apart(dtype: str, modules: dict[str, Any]) -> None:
    query, document = same_codes(dtype, 127)
    wanted = reference.maxsim([query], [document], **EVERYTHING)
    assert (wanted.argmax >= 16).any(), "the first of the copies must not always win"
    for module in modules.values():
        sets = [module.pack(side, [0, len(side)], dtype) for side in (query, document)]
        assert_same_result(module.score(*sets), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [4, 127, 4096])
def test_codes_of_the_largest_magnitude(dtype: str, depth: int, modules: dict[str, Any]) -> None:
    query, document = extreme_codes(dtype, depth)
    wanted = reference.maxsim([query], [document], **EVERYTHING)
    for module in modules.values():
        sets = [module.pack(side, [0, len(side)], dtype) for side in (query, document)]
        assert_same_result(module.score(*sets), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_normalised_tokens_have_the_bits_of_the_native_rows(dtype: str, modules: dict[str, Any]) -> None:
    x = tokens("heavy_tailed", dtype, 40, 33, 5)
    native = nk.pack(x, normalize=True).unpack()
    for module in modules.values():
        packed = module.pack(x, [0, 15, 15, 40], dtype, normalize=True)
        content = module.read(packed.address, packed.nbytes)
        assert content.endswith(np.asarray(native).tobytes()), "the originals are the last region"


def test_layout_and_header_are_those_of_the_table(modules: dict[str, Any]) -> None:
    for engine, module in modules.items():
        packed = module.pack(tokens("random", "f32", 5, 8, 1), [0, 5], "f32")
        assert int.from_bytes(module.read(packed.address + 12, 4), "little") == layout_ids()[ROW[engine]]
        module.check(module.call("check", packed.address, float(packed.nbytes)))


def test_a_row_packs_and_scores_what_is_its_own(modules: dict[str, Any]) -> None:
    from wasm_host import Status

    module, x = modules["relaxed"], tokens("random", "f32", 5, 8, 1)
    own, serial = module.pack(x, [0, 5], "f32"), module.pack(x, [0, 5], "f32", row="serial")
    with pytest.raises(Status, match="pack_mismatch"):
        module.score(serial, own)
    assert_same_result(module.score(serial, serial), module.score(own, own))
    with pytest.raises(Status, match="missing_kernel"):
        modules["plain"].pack(x, [0, 5], "f32", row="v128relaxed")


def test_damaged_and_truncated_buffers_are_refused(modules: dict[str, Any]) -> None:
    from wasm_host import Status

    module = modules["relaxed"]
    packed = module.pack(tokens("random", "bf16", 9, 8, 1), [0, 4, 9], "bf16")
    content = module.read(packed.address, packed.nbytes)
    for damage in ({"at": 0}, {"at": 40}, {"at": 250}, {"at": 256 + 15}):
        broken = bytearray(content)
        broken[damage["at"]] ^= 0x40
        with pytest.raises(Status, match="pack_mismatch"):
            module.check(module.call("check", module.place(bytes(broken)), float(len(broken))))
    with pytest.raises(Status, match="pack_mismatch"):
        module.check(module.call("check", packed.address, float(packed.nbytes - 1)))


@pytest.mark.parametrize("count", [2**23, 2**31, 2**40, 2**60])
def test_a_collection_beyond_the_address_space_is_an_error(count: int, modules: dict[str, Any]) -> None:
    from wasm_host import Status

    for module in modules.values():
        with pytest.raises(Status, match=r"size_overflow: .*address space"):
            module.pack_size("f32", 1, count, 128)
        with pytest.raises(Status, match="bad_alloc"):
            module.allocate(count * 512)


def test_memory_grows_and_is_given_back(built: Built) -> None:
    module = start(built.folder / RELAXED)
    x, sizes = np.ones((4000, 128), np.float32), [module.memory_bytes()]
    for _ in range(12):
        module.release(module.pack(x, [0, 4000], "f32").address)
        sizes.append(module.memory_bytes())
    assert sizes[0] < x.nbytes < sizes[4]
    assert len(set(sizes[4:])) == 1, "memory that was given back is used again"


# --------------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module", params=["relaxed", "deterministic"])
def training(request: pytest.FixtureRequest, built: Built) -> Any:
    """A module that exports gradients and nearest neighbours too."""
    target, options = built.folder / "objects", wasm_build.MODULES[RELAXED]
    extra = wasm_build.compile_object("tests/wasm/training.c", target, tools.zig(), options)
    wasm_build.link([*built.objects.values(), extra], built.folder / "training.wasm", tools.zig())
    return start(built.folder / "training.wasm", request.param)


def read_array(module: Any, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    content = module.read(address, int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.frombuffer(content, dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nearest_neighbours_have_the_bits_of_the_reference(dtype: str, training: Any) -> None:
    for seed, kind in enumerate(("random", "exact_duplicates", "mixed_scales", "nan", "outlier_dimension")):
        depth = (3, 128, 19, 8, 33)[seed]
        sides = [[tokens(kind, dtype, n, depth, seed + i) for i, n in enumerate(c)] for c in ((70, 0, 9), (300, 5, 0))]
        offsets = [np.cumsum([0, *map(len, side)]) for side in sides]
        places = [
            training.place(array)
            for side, starts in zip(sides, offsets)
            for array in (np.concatenate(side), starts.astype(np.uint64))
        ]
        nearest, squares = training.allocate(4 * 79), training.allocate(8 * 79)
        number = {"f32": 2, "f16": 3, "bf16": 4}[dtype]
        found = []
        for serial in (0, 1):
            training.check(training.call("test_nearest", serial, number, depth, *places, 3, nearest, squares))
            found.append([read_array(training, nearest, (79,), "i4"), read_array(training, squares, (79,), "f8")])
        for mine, wanted in zip(*found):
            assert_same_bits(mine, wanted, kind)
        distances = reference.chamfer(sides[0][:1], sides[1][:1], both=False, reduction="sum")
        assert_same_bits(np.cumsum(found[0][1][:70])[-1:], np.asarray(distances), kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("metric", METRICS)
def test_gradients_have_the_bits_of_the_native_row(dtype: str, metric: str, training: Any) -> None:
    queries = [tokens("heavy_tailed", dtype, count, 33, count) for count in (9, 0, 32)]
    documents = [tokens("heavy_tailed", dtype, count, 33, 50 + count) for count in (17, 0, 40, 1)]
    upstream = np.random.default_rng(3).standard_normal((3, 4))
    wanted = nk.maxsim_grad(queries, documents, upstream, metric=metric, grad_dtype=np.float32)
    argmax = reference.maxsim(queries, documents, metric=metric, **EVERYTHING).argmax
    sides = [(np.concatenate(side), np.cumsum([0, *map(len, side)]).astype(np.uint64)) for side in (queries, documents)]
    number, kind = {"f32": 2, "f16": 3, "bf16": 4}[dtype], METRICS.index(metric)
    place = training.place
    arguments = [number, kind]
    both = [(place(x), place(starts), len(starts) - 1) for x, starts in sides]
    rest = [place(upstream), place(argmax), argmax.shape[2], *(training.allocate(8 * len(x)) for x, _ in sides)]
    for serial in (0, 1):
        for of_documents, (x, _) in enumerate(sides):
            gradient = place(np.zeros(x.shape, np.float32))
            call = ("test_gradient", serial, *arguments, of_documents, 33, *both[0], *both[1], *rest, gradient)
            training.check(training.call(*call))
            assert_same_bits(read_array(training, gradient, x.shape, "f4"), np.asarray(wanted[of_documents]))


# --------------------------------------------------------------------------------------------- Node

SCRIPTS = ROOT / "tests" / "wasm"


def node(*arguments: str | Path) -> str:
    """Run Node, and give what it printed."""
    done = subprocess.run(
        [tools.node(), *map(str, arguments)], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def javascript(script: str, built: Built, before: str = "") -> str:
    """What a script prints that has tests/wasm/prologue.mjs, `folder`, and `start`, which loads the built modules."""
    prologue, folder = json.dumps((SCRIPTS / "prologue.mjs").as_uri()), json.dumps(str(built.folder))
    head = (
        f"{before}\nconst {{ face, readFileSync, starter, thrown }} = await import({prologue});"
        f"const folder = {folder}, start = starter(folder);"
    )
    return node("--input-type=module", "-e", head + script)


def as_json(side: reference.Sets) -> dict[str, Any]:
    """Token sets for a script: elements as base64, offsets as a list."""
    return {"tokens": base64.b64encode(side.tokens.tobytes()).decode(), "offsets": side.offsets.tolist()}


def test_the_same_cases_in_node(built: Built, tmp_path: Path) -> None:
    chosen = CASES[::2]
    facts = [{"dtype": c.dtype, "depth": c.depth, "metric": c.metric, "reduction": c.reduction} for c in chosen]
    data = [{**fact, "queries": as_json(q), "documents": as_json(d)} for fact, (q, d) in zip(facts, map(sides, chosen))]
    (tmp_path / "cases.json").write_text(json.dumps(data))
    answer = json.loads(node(SCRIPTS / "conformance.mjs", built.folder, tmp_path / "cases.json"))
    assert int(answer["node"].split(".")[0]) >= 22
    assert [run["row"] for run in answer["runs"]] == ["v128relaxed", "serial"]
    for each in answer["runs"]:
        assert len(each["results"]) == len(chosen)
        for case, result in zip(chosen, each["results"]):
            wanted = expected(case)
            arrays = zip(wanted, map(base64.b64decode, result))
            actual = [np.frombuffer(content, array.dtype).reshape(array.shape) for array, content in arrays]
            assert_same_result(type(wanted)(*actual), wanted)
            assert_bounds_follow_the_formula(actual[3], wanted.bounds)


def test_a_saved_collection_opens_in_any_row(built: Built) -> None:
    """Another row's buffer is packed anew, also that of a row which these modules lack: the native ones, with tiles."""
    documents = [tokens("random", "f32", count, 19, count) for count in (5, 0, 40)]
    wanted = reference.maxsim([documents[0]], documents).tolist()
    for row in (row.name for row in nk.backends() if row.device == "cpu" and row.available and "f32" in row.dtypes):
        packed = nk.pack(documents, backend=row)
        (built.folder / "packed.nkpack").write_bytes(bytes(memoryview(packed.buffer)))
        (built.folder / "query.f32").write_bytes(documents[0].tobytes())
        printed = javascript(
            """
            const query = new Float32Array(Uint8Array.from(readFileSync(`${folder}/query.f32`)).buffer);
            for (const row of ["v128relaxed", "serial"]) {
                const nk = await start({ row });
                const packed = nk.open(readFileSync(`${folder}/packed.nkpack`));
                const moved = (await start()).open(packed.save());
                console.log(JSON.stringify([packed.row, moved.row, [...nk.maxsim(query, packed).scores].map(String)]));
            }
            """,
            built,
        )
        for line, name in zip(printed.splitlines(), ("v128relaxed", "serial")):
            first, second, scores = json.loads(line)
            assert (first, second) == (name, "v128relaxed")
            assert [[float(score.replace("Infinity", "inf")) for score in scores]] == wanted


WRONG_CALLS = {
    "nk.pack(new Float64Array(8), { depth: 4 })": "vectors: Float64Array, wanted .* Float32Array.from",
    "nk.pack(new Uint16Array(8), { depth: 4 })": 'dtype: undefined, wanted "bf16" or "f16"',
    "nk.pack(new Float32Array(8), { depth: 4, dtype: 'bf16' })": 'dtype: "bf16", wanted "f32"',
    "nk.pack(new Float32Array(8))": "depth: undefined is no number of elements",
    "nk.pack(new Float32Array(9), { depth: 4 })": "vectors: 9 elements are no multiple of the depth, 4",
    "nk.pack([new Float32Array(8), new Float32Array(6)], { depth: 4 })": r"vectors\[1\]: 6 elements",
    "nk.pack(new Float32Array(8), { depth: 4, offsets: [0, 2, 1, 2] })": r"offsets: offsets\[2\] is 1; they .* fall",
    "nk.pack(new Float32Array(8), { depth: 4, offsets: [0, 3] })": "offsets: 0 to 3, wanted 0 to 2",
    "nk.open('text')": "bytes: String, wanted an ArrayBuffer",
    "nk.open(new Uint8Array(40))": "bytes: 40 bytes are less than a header",
    "nk.open(new Uint8Array(400))": "bytes: the buffer was packed by another row",
    "nk.open(packed.save().subarray(0, 300))": r"bytes: .* header speaks of \d+ bytes, 300 came",
    "nk.maxsim(new Float32Array(4), new Float32Array(4))": "documents: Float32Array, wanted a packed collection",
    "nk.maxsim(nk.pack(new Float32Array(3), { depth: 3 }), packed)": "queries: depth 3, the documents have 4",
    "nk.maxsim(nk.pack(new Uint16Array(4), { depth: 4, dtype: 'f16' }), packed)": "queries: dtype f16, the .* have f32",
    "nk.maxsim(packed, packed, { metric: 'l2' })": 'metric: "l2", wanted one of dot, cosine, angular',
    "nk.maxsim(packed, packed, { range: [1, 9] })": r"range: \[1,9\], wanted \[begin, end\] within \[0, 2\]",
    "(packed.free(), nk.maxsim(new Float32Array(4), packed))": "documents: this collection was freed",
    "nk.maxsim(other.pack(new Float32Array(4), { depth: 4 }), packed)": "queries: it lies in another module's memory",
    "nk.pack({ constructor: Float32Array, length: 2 ** 32, byteLength: 2 ** 34 }, { depth: 128 })": (
        "vectors: 17179869184 bytes do not fit .* 4 GB; .* split the collection"
    ),
    "start({ row: 'haswell' })": 'row: "haswell", wanted one of v128relaxed, serial',
    "start({ plain: 'nowhere.wasm', row: 'serial' })": r"plain: file:.*nowhere.wasm cannot be read \(ENOENT\)",
    "face.topk([1, 2], -1)": "k: -1, wanted how many",
}


def test_errors_name_the_argument_and_the_fix(built: Built) -> None:
    script = """
        for (const call of CALLS) {
            const nk = await start(), other = await start();
            const packed = nk.pack(new Float32Array(12), { depth: 4, offsets: [0, 1, 3] });
            const names = { nk, other, packed, start, face };
            const run = new Function(...Object.keys(names), `return ${call}`);
            console.log(await thrown(() => run(...Object.values(names))));
        }
    """
    printed = javascript(script.replace("CALLS", json.dumps(list(WRONG_CALLS))), built).splitlines()
    assert len(printed) == len(WRONG_CALLS)
    for line, (call, wanted) in zip(printed, WRONG_CALLS.items()):
        assert re.match(f"NumKongError {wanted}", line), f"{call}: {line}"


def test_what_the_documentation_shows_runs(built: Built) -> None:
    (example,) = re.findall(r"```js\n(.*?)```", (ROOT / "docs" / "webassembly.md").read_text(), re.S)
    lines = [line for line in example.splitlines() if not line.startswith("import ")]
    given = """
        const tokens = (count) => Float32Array.from({ length: count * 128 }, (_, i) => Math.sin(i * i + count));
        const [first, second, question] = [tokens(9), tokens(5), tokens(5)];
        const { topk } = face;
    """
    printed = javascript(given + "\n".join(lines).replace("await load()", "await start()"), built).splitlines()
    assert printed[0] == "v128relaxed null"
    assert re.fullmatch(r"Float64Array\(2\) \[ [\d.-]+, 1 \] \[ 1 \]", printed[1]), "the second is the question itself"


def test_freed_memory_is_used_again_by_the_face(built: Built) -> None:
    script = """
        const nk = await start(), vectors = new Float32Array(4000 * 128).fill(1), sizes = [];
        for (let i = 0; i !== 12; ++i) { nk.pack(vectors, { depth: 128 }).free(); sizes.push(nk.memoryBytes); }
        console.log(new Set(sizes.slice(4)).size);
    """
    assert javascript(script, built) == "1"


def test_node_20_and_engines_without_the_instruction_get_the_serial_row(built: Built) -> None:
    script = "const nk = await start(); console.log(nk.row, nk.reason);"
    assert javascript(script, built) == "v128relaxed null"
    old = "Object.defineProperty(process.versions, 'node', { value: '20.19.0' });"
    assert re.match("serial Node 20 computes the relaxed dot product wrong", javascript(script, built, old))
    without = "WebAssembly.validate = () => false;"
    assert javascript(script, built, without) == "serial this engine does not have WebAssembly relaxed SIMD"


def test_ranking_puts_bad_scores_last(built: Built) -> None:
    script = "console.log(JSON.stringify([face.topk([1, NaN, 3, -Infinity, 3], 9), face.topk([2, 1, NaN], 2, true)]));"
    assert json.loads(javascript(script, built)) == [[2, 4, 0, 3, 1], [1, 0]]


# --------------------------------------------------------------------------------------------- faults, one at a time


@dataclass(frozen=True)
class Fault:
    """In `file`, `old` becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    engines: tuple[str, ...] = ("relaxed", "deterministic")


TILE, VECTORS, ROW_FILE = "c/kernels/wasm_tile128.inc", "c/kernels/wasm_v128.inc", "c/backends/v128relaxed.c"
#: The deterministic meaning takes both operands as signed, and so do the engines of Arm: there nobody can tell.
UNSIGNED = ("relaxed",) if platform.machine() in ("x86_64", "AMD64") else ()
FAULTS = (
    Fault("documents keep 8 bits", ROW_FILE, "NK_CODE_LIMIT_ 63", "NK_CODE_LIMIT_ 127"),
    Fault("and their bias", ROW_FILE, "63\n#define NK_CODE_BIAS_ 64", "127\n#define NK_CODE_BIAS_ 128"),
    Fault("operands change places", TILE, "add(query, documents, sums)", "add(documents, query, sums)", UNSIGNED),
    Fault("the last of equal tokens wins", "c/scoring.inc", "? index < best->index :", "? index > best->index :"),
    Fault("a tail of the depth is cut", VECTORS, "count * bytes);", "count / 4 * 4 * bytes);"),
    Fault(
        "a lane's second best is forgotten",
        VECTORS,
        "= wasm_f32x4_extract_lane(second, 0);",
        "= wasm_f32x4_extract_lane(second, 0) - 1e9f;",
    ),
    Fault("large halves are infinite", VECTORS, "const_splat(31 << 23)", "const_splat(30 << 23)"),
    Fault("what quantising leaves is forgotten", VECTORS, "return sqrt(square *", "return 0 * sqrt(square *"),
)


def is_red(module: Any) -> bool:
    """Whether part of the suite finds something wrong with a module."""
    try:
        for case in CASES[::2]:
            assert_same_result(run(module, case), expected(case))
        for sides_of, dtype in itertools.product((extreme_codes, same_codes), DTYPES):
            query, document = sides_of(dtype, 127)
            sets = [module.pack(side, [0, len(side)], dtype) for side in (query, document)]
            assert_same_result(module.score(*sets), reference.maxsim([query], [document], **EVERYTHING))
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_turns_the_suite_red(fault: Fault, built: Built, tmp_path: Path) -> None:
    for folder in ("c", "include"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    text = (tmp_path / fault.file).read_text()
    assert text.count(fault.old) == 1, f"{fault.old!r} is {text.count(fault.old)} times in {fault.file}"
    (tmp_path / fault.file).write_text(text.replace(fault.old, fault.new))
    changed = wasm_build.compile_object(ROW_FILE, tmp_path, tools.zig(), wasm_build.MODULES[RELAXED], tmp_path)
    wasm_build.link({**built.objects, ROW_FILE: changed}.values(), tmp_path / RELAXED, tools.zig())
    assert all(is_red(start(tmp_path / RELAXED, engine)) for engine in fault.engines)


# --------------------------------------------------------------------------------------------- instructions


def test_the_inner_loop_is_the_relaxed_dot(built: Built) -> None:
    text = disassemble(built.folder / RELAXED)
    loops = [loop.split(" br_if")[0] for loop in text.split(" loop")[1:]]
    counts = [Counter(line.split()[0] for line in loop.splitlines() if line.split()) for loop in loops]
    screens = [count for count in counts if count["i32x4.relaxed_dot_i8x16_i7x16_add_s"]]
    assert len(screens) == 1
    (screen,) = screens
    assert screen["i32x4.relaxed_dot_i8x16_i7x16_add_s"] == 8, "two vectors of documents x four query tokens"
    assert screen["v128.load"] == 2 and screen["v128.load32_splat"] == 4, "and nothing is loaded twice, nothing spilt"
    assert screen["v128.store"] == 0
    assert not re.search(r"\.relaxed_|v128", re.sub(r"\(data .*", "", disassemble(built.folder / PLAIN)))


def disassemble(module: Path) -> str:
    """A module as text, by WABT."""
    script = """
        const { readFileSync } = require("fs");
        require("wabt")().then((wabt) => {
            const content = Uint8Array.from(readFileSync(process.argv[1]));
            process.stdout.write(wabt.readWasm(content, { relaxed_simd: true }).toText({}));
        });
    """
    folder = tools.npm_packages("wabt", "wabt@1.0.39")
    command = [tools.node(), "-e", script, str(module)]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=60).stdout


def test_there_is_nothing_to_import(modules: dict[str, Any]) -> None:
    assert all(module.imports == [] for module in modules.values())
