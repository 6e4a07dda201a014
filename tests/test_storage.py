"""Files of packed collections: round trips, damage, crashes, full disks, other rows' files."""

from __future__ import annotations

import errno
import gc
import json
import mmap
import os
import pickle
import signal
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from oracle import DTYPES, ROOT, assert_same_bits, assert_same_result
from test_coded import CODED, coding

import numkong_py as nk
from numkong_py import storage
from numkong_py.backends import BACKENDS
from numkong_py.cpu import open_packed
from numkong_py.layout import HEADER, Contents, read_header

RANDOM = np.random.default_rng(8)
LENGTHS = [5, 0, 17, 1, 0, 40, 3, 0]
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])
DOCUMENTS = [RANDOM.standard_normal((count, 20)).astype(np.float32) for count in LENGTHS]
QUERIES = [RANDOM.standard_normal((count, 20)).astype(np.float32) for count in (4, 0, 9)]
AVAILABLE = [row for row in BACKENDS if row.device == "cpu" and row.available]
EVERYTHING = {"return_argmax": True, "return_token_scores": True, "return_bounds": True}
OPTIONS = [{"mmap": mmap, "verify": verify} for mmap in (True, False) for verify in storage.VERIFY]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    nk.pack(DOCUMENTS).save(tmp_path / "corpus.safetensors")
    return tmp_path / "corpus.safetensors"


def tensors(path: Path) -> tuple[dict[str, str], dict[str, Any], int]:
    """Metadata, table and start of the tensors, read without the code that is tested."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:start])
    return table.pop("__metadata__"), table, start


# ------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("row", AVAILABLE, ids=lambda row: row.name)
def test_round_trip_bit_for_bit(row: Any, tmp_path: Path) -> None:
    for dtype in row.dtypes:
        bits = RANDOM.integers(0, 256, (66, 20 * DTYPES[dtype].itemsize), np.uint8)  # NaN and infinities too
        packed = nk.pack(bits.view(DTYPES[dtype]), offsets=OFFSETS, backend=row.name)
        queries = nk.pack([query.astype(DTYPES[dtype]) for query in QUERIES], backend=row.name)
        packed.save(tmp_path / "x")
        for options in OPTIONS:
            opened = nk.open(tmp_path / "x", **options)
            assert opened.buffer.tobytes() == packed.buffer.tobytes()
            assert opened.buffer.ctypes.data % 64 == 0 and not opened.buffer.flags.writeable
            assert repr(opened) == repr(packed)
            for metric in ("dot", "cosine", "angular"):
                wanted = nk.maxsim(queries, packed, metric=metric, **EVERYTHING)
                assert_same_result(nk.maxsim(queries, opened, metric=metric, **EVERYTHING), wanted)
            assert b"".join(part.tobytes() for part in opened.unpack()) == bits.tobytes()


def test_one_set_stays_one_set_and_no_documents_stay_none(tmp_path: Path) -> None:
    for x in (DOCUMENTS[0], [DOCUMENTS[0]], DOCUMENTS[1], [DOCUMENTS[1]] * 3):
        nk.pack(x).save(tmp_path / "x")
        opened = nk.open(tmp_path / "x", verify="full")
        assert (opened.single, opened.lengths.tolist()) == (nk.pack(x).single, nk.pack(x).lengths.tolist())
        assert nk.maxsim(opened, DOCUMENTS).shape == nk.maxsim(x, DOCUMENTS).shape
    nk.pack([], depth=7, dtype="bf16").save(tmp_path / "x")
    opened = nk.open(tmp_path / "x", verify="full")
    assert (len(opened), opened.depth, opened.dtype) == (0, 7, "bf16")


@pytest.mark.parametrize("key", [2, 4, -1, slice(2, 6), slice(3, 3), slice(None, None, 2), [5, 0, 5]], ids=str)
def test_a_view_saves_itself_only(key: Any, tmp_path: Path) -> None:
    view = nk.pack(DOCUMENTS)[key]
    view.save(tmp_path / "x")
    opened = nk.open(tmp_path / "x", verify="full")
    assert (opened.single, opened.lengths.tolist()) == (view.single, view.lengths.tolist())
    assert opened.nbytes == nk.pack_size(view.tokens, 20, "f32", documents=len(view), backend=view.backend)
    assert_same_bits(nk.maxsim(QUERIES, opened), nk.maxsim(QUERIES, view))


def test_a_mapped_tensor_pickles_and_outlives_its_file(saved: Path) -> None:
    wanted = nk.maxsim(QUERIES, DOCUMENTS)
    opened = nk.open(saved)
    part = opened[2:6]
    copy = pickle.loads(pickle.dumps(opened))
    assert pickle.loads(pickle.dumps(part)).lengths.tolist() == LENGTHS[2:6]
    saved.unlink()
    del opened
    gc.collect()
    assert_same_bits(nk.maxsim(QUERIES, part), wanted[:, 2:6])
    assert_same_bits(nk.maxsim(QUERIES, copy), wanted)


def test_saving_over_the_mapped_file_does_not_hurt_its_reader(saved: Path) -> None:
    opened = nk.open(saved)
    opened[2:].save(saved)
    second = nk.open(saved)
    nk.pack(DOCUMENTS[:1]).save(saved)
    wanted = nk.maxsim(QUERIES, DOCUMENTS)
    assert_same_bits(nk.maxsim(QUERIES, opened), wanted)
    assert_same_bits(nk.maxsim(QUERIES, second), wanted[:, 2:])
    assert_same_bits(nk.maxsim(QUERIES, nk.open(saved)), wanted[:, :1])
    second.save(saved)
    assert len(nk.open(saved, verify="full")) == 6


# ------------------------------------------------------------------------------------------- what others see


def test_any_safetensors_reader_lists_it_and_reads_the_vectors(saved: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    read = numpy.load_file(saved)
    assert read["originals"].tobytes() == np.concatenate(DOCUMENTS).tobytes()
    assert read["originals"].shape == (66, 20) and read["originals"].dtype == np.float32
    assert read["offsets"].tolist() == OFFSETS.tolist()
    _, table, start = tensors(saved)
    buffer = b"".join(read[name].tobytes() for name in sorted(table, key=lambda name: table[name]["data_offsets"]))
    assert buffer == nk.pack(DOCUMENTS).buffer.tobytes() == saved.read_bytes()[start:]

    from safetensors import safe_open

    with safe_open(saved, "numpy") as file:
        metadata = file.metadata()
    assert metadata["row"] == nk.pack(DOCUMENTS).backend
    assert (metadata["documents"], metadata["tokens"], metadata["depth"], metadata["dtype"]) == ("8", "66", "20", "f32")
    numpy.save_file(read, saved, metadata)  # what a tool does that reads and writes tensors
    with pytest.raises(nk.CorruptFile, match="wrote it anew; pass its originals"):
        nk.open(saved)
    numpy.save_file({"x": DOCUMENTS[0]}, saved)
    with pytest.raises(nk.CorruptFile, match="did not write; pass its arrays"):
        nk.open(saved)


def test_tensors_are_aligned(tmp_path: Path) -> None:
    for lengths in ([1], [3, 4], LENGTHS, []):
        nk.pack([np.ones((count, 3), np.float16) for count in lengths], depth=3, dtype="f16").save(tmp_path / "x")
        _, table, start = tensors(tmp_path / "x")
        assert start % 64 == 0
        assert all(table[name]["data_offsets"][0] % 64 == 0 for name in ("header", "offsets", "originals"))


# ------------------------------------------------------------------------------------------- failing to write


class Advised(mmap.mmap):
    """A mapping that remembers what it was told."""

    def madvise(self, option: int, start: int, length: int) -> None:
        assert option == mmap.MADV_WILLNEED and start % mmap.PAGESIZE == 0
        super().madvise(option, start, length)
        self.__dict__.setdefault("ranges", []).append((start, start + length))


@pytest.mark.skipif(not hasattr(mmap.mmap, "madvise"), reason="this system has no madvise")
def test_reading_ahead_covers_chosen_documents_and_few_others(tmp_path: Path) -> None:
    lengths = np.array([700, 0, 900, 1, 800, 0])
    packed = nk.pack(np.ones((lengths.sum(), 64), np.float32), offsets=np.concatenate([[0], np.cumsum(lengths)]))
    (tmp_path / "bytes").write_bytes(packed.buffer.tobytes())
    with open(tmp_path / "bytes", "rb") as file:
        mapped = Advised(file.fileno(), 0, access=mmap.ACCESS_READ)
    contents = open_packed(np.frombuffer(mapped, np.uint8))
    storage.read_ahead(contents, np.array([1, 2, 5]))
    header = read_header(contents.buffer)
    assert len(mapped.ranges) == 2, "the codes and the vectors of the one document that has any"
    for (start, stop), (begin, end) in zip(
        mapped.ranges, ((header.screen_at, header.originals_at), (header.originals_at, header.total_bytes))
    ):
        wanted = [begin + (end - begin) * token // packed.tokens for token in (700, 1600)]
        assert wanted[0] - mmap.PAGESIZE < start <= wanted[0] and stop == wanted[1]
    storage.read_ahead(packed.contents, np.array([0]))  # in memory: nothing to do
    storage.read_ahead(nk.pack([], dtype="f32", depth=4).contents, np.zeros(0, np.int64))


def failing(saved: Path, error: type[Exception], save: Callable[[], Any]) -> str:
    """Message of a save that must fail, leave the old file and leave nothing else."""
    before, names = saved.read_bytes(), sorted(os.listdir(saved.parent))
    with pytest.raises(error) as caught:
        save()
    assert saved.read_bytes() == before
    assert sorted(os.listdir(saved.parent)) == names
    return str(caught.value)


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES], ids=errno.errorcode.get)
def test_a_failing_disk(step: str, number: int, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number), "an inner name")

    monkeypatch.setattr(os, step, fail)
    message = failing(saved, OSError, lambda: nk.pack(DOCUMENTS[:2]).save(saved))
    assert str(saved) in message and os.strerror(number) in message and "an inner name" not in message


def test_a_folder_that_cannot_be_flushed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush = os.fsync

    def fail(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(handle)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=f"{saved.name}"):
        nk.pack(DOCUMENTS[:2]).save(saved)
    assert len(nk.open(saved)) == 2 and os.listdir(saved.parent) == [saved.name]


def test_an_interrupted_save(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    failing(saved, KeyboardInterrupt, lambda: nk.pack(DOCUMENTS[:2]).save(saved))


@pytest.mark.skipif(os.name != "posix", reason="limits on file sizes are POSIX")
def test_a_disk_that_fills_while_writing(saved: Path) -> None:
    code = (
        "import resource, sys, numpy as np, numkong_py as nk\n"
        "packed = nk.pack(np.ones((100000, 16), np.float32))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n    packed.save(sys.argv[1])\nexcept OSError as error:\n    print(error)\n"
    )

    def save() -> None:
        done = subprocess.run([sys.executable, "-c", code, str(saved)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        raise OSError(done.stdout)

    message = failing(saved, OSError, save)
    assert str(saved) in message and os.strerror(errno.EFBIG) in message


def test_places_that_cannot_be_written(saved: Path) -> None:
    packed = nk.pack(DOCUMENTS[:2])
    missing = saved.parent / "missing" / "x"
    assert str(missing) in failing(saved, FileNotFoundError, lambda: packed.save(missing))
    assert str(saved / "x") in failing(saved, OSError, lambda: packed.save(saved / "x"))
    assert "folder" in failing(saved, nk.InvalidArgument, lambda: packed.save(saved.parent))
    if os.path.exists("/dev/null"):
        assert "device" in failing(saved, nk.InvalidArgument, lambda: packed.save("/dev/null"))
    if sys.platform == "linux":
        failing(saved, OSError, lambda: packed.save("/proc/x"))


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_a_read_only_folder(saved: Path) -> None:
    saved.parent.chmod(0o555)
    user = os.geteuid()

    def save() -> None:
        if user == 0:
            os.seteuid(65534)  # root may write anywhere
        try:
            nk.pack(DOCUMENTS[:2]).save(saved)
        finally:
            os.seteuid(user)

    try:
        message = failing(saved, PermissionError, save)
    finally:
        saved.parent.chmod(0o755)
    assert str(saved) in message and "not written" in message


@pytest.mark.skipif(os.name != "posix", reason="modes and links are POSIX")
def test_modes_and_links(saved: Path) -> None:
    mask = os.umask(0o027)
    try:
        link = saved.parent / "link"
        link.symlink_to(saved.name)
        nk.pack(DOCUMENTS[:2]).save(link)
    finally:
        os.umask(mask)
    assert link.is_symlink() and len(nk.open(saved)) == 2
    assert stat.S_IMODE(saved.stat().st_mode) == 0o640


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_killed_at_random_points(saved: Path) -> None:
    """kill -9 while two collections are saved in turn: the file is always one of them, whole."""
    choices = [nk.pack(DOCUMENTS), nk.pack(DOCUMENTS[2:])]
    scores = {len(packed): nk.maxsim(QUERIES, packed) for packed in choices}
    reader = nk.open(saved)
    seen = set()
    begin = time.perf_counter()
    for packed in choices:
        packed.save(saved)
    round_trip = time.perf_counter() - begin  # a loaded machine takes longer: some kills must come after both saves
    for delay in RANDOM.uniform(0, max(0.01, 4 * round_trip), 200):
        child = os.fork()
        if child == 0:
            while True:
                for packed in choices:
                    packed.save(saved)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        opened = nk.open(saved, verify="full")
        seen.add(len(opened))
        assert_same_bits(nk.maxsim(QUERIES, opened), scores[len(opened)])
    assert_same_bits(nk.maxsim(QUERIES, reader), scores[8])
    assert seen == set(scores)


# ------------------------------------------------------------------------------------------- where it cannot be scored


class DeviceTokens:
    """Stands for an array on a device, of which the host can `get` a copy."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __getitem__(self, key: slice) -> DeviceTokens:
        return DeviceTokens(self.tokens[key])

    def get(self) -> np.ndarray:
        return self.tokens.copy()


def test_a_tensor_on_a_device_says_how_it_is_saved(tmp_path: Path) -> None:
    tokens = np.concatenate(DOCUMENTS)
    row = SimpleNamespace(name="sm90", device="cuda", unpack=lambda _, begin, end: DeviceTokens(tokens[begin:end]))
    packed = nk.PackedTensor(Contents(row, None, None, "f32", 20, OFFSETS, "cuda:0"))
    with pytest.raises(nk.DeviceMismatch, match=r'cuda:0.*\.to\("cpu"\)'):
        packed.save(tmp_path / "x")
    for view in (packed, packed[2:5], packed[2]):
        view.to("cpu").save(tmp_path / "x")
        opened = nk.open(tmp_path / "x")
        assert (opened.single, opened.lengths.tolist()) == (view.single, view.lengths.tolist())
        assert_same_bits(
            np.concatenate([part.unpack() for part in opened]), tokens[OFFSETS[view.begin] : OFFSETS[view.end]]
        )


def test_a_tensor_of_a_row_that_is_gone(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if len(AVAILABLE) == 1:
        pytest.skip("this machine has one row only")
    data = saved.read_bytes()
    packed = nk.pack(DOCUMENTS)
    monkeypatch.setenv("NUMKONG_CAPABILITIES", "serial")
    gone = pickle.loads(pickle.dumps(packed))
    gone.save(saved)
    assert saved.read_bytes() == data
    failing(saved, nk.BackendUnavailable, lambda: gone[1:3].save(saved))


# ------------------------------------------------------------------------------------------- damage


def test_every_truncation_and_extension_is_seen(saved: Path) -> None:
    whole = saved.read_bytes()
    saved.write_bytes(whole + b"\0")
    with pytest.raises(nk.CorruptFile, match="added"):
        nk.open(saved)
    for size in reversed(range(len(whole))):
        os.truncate(saved, size)
        with pytest.raises(nk.CorruptFile, match=f"{saved.name}: {size} bytes"):
            nk.open(saved)


def facts(packed: nk.PackedTensor) -> tuple[Any, ...]:
    scores = nk.maxsim(QUERIES, packed, **EVERYTHING)
    return packed.lengths.tolist(), *(array.tobytes() for array in scores), *(x.tobytes() for x in packed.unpack())


def test_flipped_bytes_are_seen(saved: Path) -> None:
    """Anywhere with verify="full", in headers and offsets always."""
    whole = saved.read_bytes()
    wanted = facts(nk.open(saved))
    _, table, start = tensors(saved)
    trusted = start + table["offsets"]["data_offsets"][1]
    refused = 0
    places = [*range(trusted), *RANDOM.integers(trusted, len(whole), 2000).tolist()]
    for place, flip in zip(places, RANDOM.integers(1, 256, len(places)).tolist()):
        damaged = bytearray(whole)
        damaged[place] ^= flip
        saved.write_bytes(damaged)
        for verify in storage.VERIFY:
            try:
                opened = nk.open(saved, mmap=bool(flip & 1), verify=verify)
            except nk.CorruptFile as error:
                assert str(saved) in str(error)
                refused += 1
                continue
            if verify == "full" or place < trusted:
                assert facts(opened) == wanted, f"byte {place} ^ {flip}"
    assert refused > 2000 + trusted  # spaces that stay blank aside, every one


def score_damaged_contents(folder: str) -> None:
    """Score, in a process of its own, collections with damage that verify="header" does not see, in every region."""
    path = Path(folder, "damaged")
    kinds = [(dtype, "exact") for dtype in DTYPES] + [("f32", precision) for precision in CODED]
    for row, (dtype, precision) in product(AVAILABLE, kinds):
        if dtype not in row.dtypes:
            continue
        documents = [document.astype(DTYPES[dtype]) for document in DOCUMENTS]
        codes = {} if precision == "exact" else coding(precision, documents[0].shape[1])
        packed = nk.pack(documents, backend=row.name, **codes)
        packed.save(path)
        whole, start = path.read_bytes(), tensors(path)[2]
        regions = sorted({*packed.buffer[64:144].view("<u8").tolist(), packed.nbytes} - {0})
        queries = nk.pack([query.astype(DTYPES[dtype]) for query in QUERIES], backend=row.name)
        for first, last in pairwise(regions):
            for size in (1, 2, 4, 8, 64, last - first):
                for pattern in (b"\0", b"\x7f", b"\xff", RANDOM.bytes(last - first + 1)):
                    place = first + int(RANDOM.integers(max(1, last - first - size + 1)))
                    damage = (pattern * size)[: min(size, last - place)]
                    data = bytearray(whole)
                    data[start + place : start + place + len(damage)] = damage
                    path.unlink()
                    path.write_bytes(data)
                    opened = nk.open(path)
                    for metric in ("dot", "cosine", "angular"):
                        nk.maxsim(queries, opened, metric=metric, **EVERYTHING)
                    nk.topk(queries, opened, 3)
                    opened.unpack()


def test_damaged_contents_give_numbers_and_no_signal(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-2000:]}"


def test_offsets_are_hashed_too(saved: Path) -> None:
    """A boundary between two documents that moves by one token: in order, in range, and wrong."""
    _, _, start = tensors(saved)
    damaged = bytearray(saved.read_bytes())
    damaged[start + HEADER.itemsize + 8] ^= 1
    saved.write_bytes(damaged)
    with pytest.raises(nk.CorruptFile, match="hash of offsets"):
        nk.open(saved)


@pytest.mark.parametrize(
    "spaces, message", [(64, None), (8, "wrote it anew"), (1 << 16, "no header of a packed")], ids=str
)
def test_padding_of_the_header(spaces: int, message: str | None, saved: Path) -> None:
    _, _, start = tensors(saved)
    data = saved.read_bytes()
    saved.write_bytes((start - 8 + spaces).to_bytes(8, "little") + data[8:start] + b" " * spaces + data[start:])
    if message is None:
        assert facts(nk.open(saved)) == facts(nk.pack(DOCUMENTS))
        return
    with pytest.raises(nk.CorruptFile, match=message):
        nk.open(saved)


def test_another_version_is_named(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes().replace(b'"numkong_py": "1"', b'"numkong_py": "2"'))
    with pytest.raises(nk.CorruptFile, match="version is '2', and this version of numkong_py reads '1'"):
        nk.open(saved)


def forged(saved: Path, change: Callable[[dict[str, Any], bytearray], Any]) -> Path:
    """The saved file with its metadata, table and bytes changed, and all hashes made right again."""
    metadata, table, start = tensors(saved)
    data = bytearray(saved.read_bytes()[start:])
    text = {"__metadata__": metadata, **table}
    change(text, data)
    for name, tensor in table.items():
        metadata[storage.HASH + name] = storage.digest([data[slice(*tensor["data_offsets"])]])
    head = storage._encode(text.pop("__metadata__"), text)
    path = saved.parent / "forged"
    path.write_bytes(head + data)
    return path


def put(place: int, value: int) -> Callable[[dict[str, Any], bytearray], None]:
    return lambda text, data: data.__setitem__(slice(place, place + 8), value.to_bytes(8, "little"))


@pytest.mark.parametrize(
    "change",
    [
        put(HEADER.itemsize, 3),
        put(HEADER.itemsize + 8, 7),
        put(HEADER.itemsize + 8, (1 << 64) - 1),
        put(HEADER.itemsize + 64, 67),
        put(HEADER.itemsize + 64, 65),
        put(24, 7),
        put(32, 1 << 63),
        put(40, (1 << 64) - 1),
        put(48, 1 << 62),
        put(56, 320),
        put(0, 0),
        put(8, 1),
        put(240, 1),
        lambda text, data: text["__metadata__"].update(numkong_py="2"),
        lambda text, data: text["__metadata__"].pop("numkong_py"),
        lambda text, data: text["__metadata__"].pop("row"),
        lambda text, data: text["__metadata__"].update(depth="21"),
        lambda text, data: text["__metadata__"].update(single="maybe"),
        lambda text, data: text["originals"].update(shape=[20, 66]),
        lambda text, data: text["originals"].update(dtype="I32"),
        lambda text, data: text.update(more=text["header"]),
        lambda text, data: data.extend(bytes(64)),
    ],
    ids=range(22),
)
def test_forged_files_are_refused(change: Callable[[dict[str, Any], bytearray], Any], saved: Path) -> None:
    assert len(nk.open(forged(saved, lambda text, data: None), verify="full")) == 8
    with pytest.raises(nk.CorruptFile, match="forged"):
        nk.open(forged(saved, change))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 100,
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (60000).to_bytes(8, "little") + b"[" * 60000,
        (20).to_bytes(8, "little") + b'{"__metadata__": [1]' + b" " * 99,
        (4).to_bytes(8, "little") + b"\xff\xfe{}",
    ],
    ids=range(8),
)
def test_files_of_other_kinds_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    for options in OPTIONS:
        with pytest.raises(nk.CorruptFile, match=f"{len(data)} bytes"):
            nk.open(tmp_path / "x", **options)


def test_other_wrong_arguments(saved: Path) -> None:
    with pytest.raises(nk.InvalidArgument, match="'none', wanted one of 'header', 'full'"):
        nk.open(saved, verify="none")
    with pytest.raises(FileNotFoundError, match="missing"):
        nk.open(saved.parent / "missing")
    with pytest.raises(OSError):
        nk.open(saved.parent)


def test_open_stays_out_of_a_star_import() -> None:
    assert "open" not in nk.__all__ and callable(nk.open)


# ------------------------------------------------------------------------------------------- other rows' files


@pytest.mark.parametrize("x", [DOCUMENTS, DOCUMENTS[2]], ids=["collection", "set"])
def test_a_row_that_does_not_exist_here(x: Any, tmp_path: Path) -> None:
    nk.pack(x).save(tmp_path / "corpus")

    def change(text: dict[str, Any], data: bytearray) -> None:
        data[12:16] = (99).to_bytes(4, "little")
        text["__metadata__"].update(layout="99", row="sme9")

    path = forged(tmp_path / "corpus", change)
    with pytest.warns(nk.RepackWarning, match=r"forged.*'sme9'.*save") as caught:
        opened = nk.open(path, verify="full")
    assert caught[0].filename == __file__
    assert (opened.single, opened.backend) == (nk.pack(x).single, nk.pack(x).backend)
    assert_same_bits(nk.maxsim(QUERIES, opened), nk.maxsim(QUERIES, x))

    def fall(text: dict[str, Any], data: bytearray) -> None:
        change(text, data)
        put(HEADER.itemsize + 8, 1 << 40)(text, data)

    with pytest.raises(nk.CorruptFile), warnings.catch_warnings():
        warnings.simplefilter("error")
        nk.open(forged(tmp_path / "corpus", fall))


def test_every_row_opens_every_other_rows_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if len(AVAILABLE) == 1:
        pytest.skip("this machine has one row only")
    wanted = nk.maxsim(QUERIES, DOCUMENTS)
    names = [row.name for row in AVAILABLE if "f32" in row.dtypes]
    for name in names:
        nk.pack(DOCUMENTS, backend=name).save(tmp_path / name)
    monkeypatch.setenv("NUMKONG_CAPABILITIES", "serial")
    for name in names:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opened = nk.open(tmp_path / name)
        assert opened.backend == "serial" and len(caught) == (name != "serial")
        assert_same_bits(nk.maxsim(QUERIES, opened), wanted)


if __name__ == "__main__":
    score_damaged_contents(sys.argv[1])
