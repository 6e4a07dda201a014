"""Index arithmetic of the CUDA kernels, emulated in NumPy: runs without a GPU, costs no device time.

Each function here is the kernel's expression with lanes as an axis; a change in a kernel belongs here as well.
"""

from __future__ import annotations

import importlib.util
import random
from collections import deque

import numpy as np
import pytest

from numkong_py.cuda import launch_table, plan

LANES = np.arange(32)


def swizzle(address: np.ndarray) -> np.ndarray:
    """128-byte swizzle of TMA and of the wgmma descriptor: bits 4 to 6 by bits 7 to 9."""
    return address ^ (((address >> 7) & 7) << 4)


# ------------------------------------------------------------------------------------- work division


@pytest.mark.parametrize("chunks", [1, 7, 33, 132, 264])
@pytest.mark.parametrize("tile", [64, 128])
def test_dealt_documents_are_each_scored_once_and_balanced(chunks: int, tile: int) -> None:
    rng = np.random.default_rng(chunks)
    for lengths in (
        np.full(1000, 300),
        rng.integers(0, 600, 1000),
        rng.integers(0, 9, 500),
        np.array([5000] + [1] * 400),
    ):
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        pieces = plan.deal_documents(offsets, chunks, tile)
        assert sorted(pieces.slot) == list(range(len(lengths)))
        np.testing.assert_array_equal(pieces.start, offsets[:-1][pieces.slot])
        np.testing.assert_array_equal(pieces.count, lengths[pieces.slot])
        assert (np.diff(pieces.chunk_begin) > 0).all() and pieces.chunk_begin[-1] == len(lengths)
        loads = np.add.reduceat(plan.tiles_of(pieces.count, tile), pieces.chunk_begin[:-1])
        assert loads.mean() / loads.max() == pytest.approx(plan.balance(lengths, chunks, tile))


@pytest.mark.parametrize("chunks", [1, 7, 33, 132])
@pytest.mark.parametrize("tile", [64, 128])
def test_cut_documents_cover_every_token_once_in_equal_chunks(chunks: int, tile: int) -> None:
    rng = np.random.default_rng(chunks)
    for lengths in (np.full(8, 1024), rng.integers(0, 600, 300), np.array([0, 0, 1, 0]), np.array([100000, 3])):
        offsets = np.concatenate([[0], np.cumsum(lengths)]) + 17
        pieces = plan.cut_documents(offsets, chunks, tile)
        seen = np.zeros(offsets[-1], int)
        for start, count in zip(pieces.start, pieces.count):
            seen[start : start + count] += 1
        assert (seen[17:] == 1).all()
        for document in range(len(lengths)):
            mine = slice(pieces.piece_begin[document], pieces.piece_begin[document + 1])
            np.testing.assert_array_equal(
                pieces.start[mine] - pieces.base[mine], np.full(len(pieces.base[mine]), offsets[document])
            )
            assert pieces.count[mine].sum() == lengths[document]
        tiles = np.add.reduceat(-(-pieces.count // tile), pieces.chunk_begin[:-1])
        assert tiles.max() - tiles.min() <= 1


def test_piece_table_holds_offsets_beyond_32_bits() -> None:
    pieces = plan.deal_documents(np.array([0, 3, 3 + 2**33]), 1, 64)
    table = plan.Pieces(pieces.start + 2**40, np.array([3, 5]), *pieces[2:]).table()
    start = (table[:, 0].view(np.uint32).astype(np.int64)) | (table[:, 1].astype(np.int64) << 32)
    np.testing.assert_array_equal(start, pieces.start + 2**40)


@pytest.mark.parametrize("blocks, grid", [(1, 264), (4, 132), (40, 132), (500, 132)])
def test_chunks_fill_the_grid(blocks: int, grid: int) -> None:
    chunks = plan.chunk_count(blocks, grid, 10**6)
    items = blocks * chunks
    assert items / (-(-items // grid) * grid) > 0.93
    assert plan.chunk_count(blocks, grid, 3) <= 3


# ------------------------------------------------------------------------------------- wgmma


def fragment_a(lane: np.ndarray, register: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and first of two columns of a warp's A fragment (m16 k16), as load_queries fills it."""
    h, far = register & 1, register >> 1
    return lane // 4 + 8 * h, 2 * (lane % 4) + 8 * far


def test_query_fragments_cover_the_tile_once() -> None:
    seen = np.zeros((16, 16), int)
    for register in range(4):
        row, column = fragment_a(LANES, register)
        seen[row, column] += 1
        seen[row, column + 1] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("tokens", [64, 128])
def test_descriptor_steps_read_the_swizzled_tile(tokens: int) -> None:
    """A box lands swizzled; k-step k of a 64-column half starts 32 k bytes on; the matrix unit swizzles again."""
    tile = np.arange(tokens * 64, dtype=np.uint16).reshape(tokens, 64)
    memory = np.zeros(tokens * 128, np.uint8)
    logical = np.arange(tokens * 128)
    memory[swizzle(logical)] = tile.view(np.uint8).reshape(-1)
    for k in range(4):
        row, byte = np.mgrid[0:tokens, 0:32]
        read = memory[swizzle(row * 128 + 32 * k + byte)].view(np.uint16)
        np.testing.assert_array_equal(read, tile[:, 16 * k : 16 * k + 16])


@pytest.mark.parametrize("kernel_tile", [64, 128])
def test_masked_and_shifted_tiles_give_the_maximum_and_the_lowest_index(kernel_tile: int) -> None:
    rng = np.random.default_rng(3)
    for count in (1, 2, 63, 64, 65, 127, 128, 129, 180, 300, 777):
        values = rng.integers(-4, 5, (16, count)).astype(np.float32)
        best, index = np.full(16, -np.inf), np.zeros(16, int)
        token, covered = 0, np.zeros(count, bool)
        while token < count:
            if count > kernel_tile:
                token = min(token, count - kernel_tile)
            valid = min(count - token, kernel_tile)
            covered[token : token + valid] = True
            part = values[:, token : token + valid]
            better = part.max(1) > best
            index = np.where(better, token + part.argmax(1), index)
            best = np.maximum(best, part.max(1))
            token += kernel_tile
        assert covered.all()
        np.testing.assert_array_equal(best, values.max(1))
        np.testing.assert_array_equal(index, values.argmax(1))


def test_accumulator_columns_of_a_thread() -> None:
    seen = np.zeros((16, 64), int)
    for element in range(32):
        j, h, e = element // 4, (element >> 1) & 1, element & 1
        seen[LANES // 4 + 8 * h, 8 * j + 2 * (LANES % 4) + e] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("m_tiles", [1, 2])
def test_spread_maxima_and_the_sum_tree(m_tiles: int) -> None:
    rng = np.random.default_rng(4)
    per_lane = rng.standard_normal((m_tiles, 2, 32)).astype(np.float32)  # m-tile, h, lane
    odd, upper = LANES & 1 == 1, LANES & 2 == 2
    kept = []
    for t in range(m_tiles):
        away = np.where(odd, per_lane[t, 0], per_lane[t, 1])
        kept.append(np.maximum(np.where(odd, per_lane[t, 1], per_lane[t, 0]), away[LANES ^ 1]))
    if m_tiles == 1:
        value = np.maximum(kept[0], kept[0][LANES ^ 2])
    else:
        away = np.where(upper, kept[0], kept[1])
        value = np.maximum(np.where(upper, kept[1], kept[0]), away[LANES ^ 2])
    s = value.astype(np.float64) + value[LANES ^ 1].astype(np.float64)
    for step in (4, 8, 16):
        s = s + s[LANES ^ step]
    for t in range(m_tiles):
        rows = per_lane[t].reshape(2, 8, 4).max(2)  # h, lane / 4
        tree = rows[0].astype(np.float64) + rows[1].astype(np.float64)
        for _ in range(3):
            tree = tree[0::2] + tree[1::2]
        assert s[2 * t] == tree[0]


def test_half_warp_tree_is_the_same_tree() -> None:
    value = np.random.default_rng(5).standard_normal(16)
    s = value + value[np.arange(16) ^ 8]
    for step in (1, 2, 4):
        s = s + s[np.arange(16) ^ step]
    tree = value[:8] + value[8:]
    for _ in range(3):
        tree = tree[0::2] + tree[1::2]
    assert s[0] == tree[0]


@pytest.mark.parametrize("longest", [1, 16, 17, 32, 33, 250, 256, 257, 1000, 1024, 2000])
def test_combine_takes_every_group_of_every_item_once(longest: int) -> None:
    """combine.cu: halves of a CTA share items of few groups, or take one item's groups in rounds."""
    groups, items = (longest + 15) // 16, 37
    threads = min(max(256, -(-groups // 2) * 32), 1024)
    halves = threads // 16
    together = max(1, halves // groups)
    seen = np.zeros((items, groups), int)
    totals = np.zeros(items, int)  # groups that the leader of an item adds
    for first in range(0, items, together):
        for round_ in range(0, groups, halves):
            for half in range(halves):
                which = half // groups if groups <= halves else 0
                item, group = first + which, round_ + half - which * groups
                if not (which < together and item < items):
                    continue
                if group < groups:
                    seen[item, group] += 1
                if half == which * groups:
                    totals[item] += min(groups - round_, halves)
    assert (seen == 1).all() and (totals == groups).all()


# ------------------------------------------------------------------------------------- mma.sync


def test_ldmatrix_addresses_read_the_copied_tile() -> None:
    """16-byte segments copied to segment ^ (row & 7); ldmatrix then finds A (16 x 16) and two B tiles (8 x 16 each)."""
    tile = np.arange(64 * 64, dtype=np.int32).reshape(64, 64)
    memory = np.zeros((64, 8, 8), np.int32)
    for row in range(64):
        for segment in range(8):
            memory[row, segment ^ (row & 7)] = tile[row, 8 * segment : 8 * segment + 8]

    def matrices(row: np.ndarray, segment: np.ndarray) -> np.ndarray:
        """ldmatrix.x4: lanes 8 m to 8 m + 7 name matrix m; its register in lane l: row l / 4, column 2 (l % 4)."""
        rows = memory[row, segment ^ (row & 7)].reshape(4, 8, 8)
        return np.stack([rows[m][LANES // 4, 2 * (LANES % 4)] for m in range(4)])

    for warp in range(4):
        for k in range(4):
            a = matrices(warp * 16 + (LANES & 15), 2 * k + (LANES >> 4))
            for register in range(4):
                row, column = fragment_a(LANES, register)
                np.testing.assert_array_equal(a[register], tile[warp * 16 + row, 16 * k + column])
    for n in range(4):
        for k in range(4):
            row = 16 * n + (LANES & 7) + ((LANES >> 4) << 3)
            b = matrices(row, 2 * k + ((LANES >> 3) & 1))
            for register, (token, far) in enumerate(((0, 0), (0, 8), (8, 0), (8, 8))):
                wanted = tile[16 * n + token + LANES // 4, 16 * k + 2 * (LANES % 4) + far]
                np.testing.assert_array_equal(b[register], wanted)


def test_loud_scan_sees_large_and_non_finite_bf16() -> None:
    halves = np.arange(65536, dtype=np.uint32)
    words = halves | (np.uint32(0x3F80) << 16)
    flagged = ((words & 0x7FFF7FFF) + 0x27802780) & 0x80008000
    values = (halves << 16).astype(np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        loud = ~(np.abs(values) < 2.0**50)
    np.testing.assert_array_equal(flagged != 0, loud)
    swapped = (halves << 16) | 0x3F80
    np.testing.assert_array_equal((((swapped & 0x7FFF7FFF) + 0x27802780) & 0x80008000) != 0, loud)


# ------------------------------------------------------------------------------------- top-k, screen


def test_radix_keys_order_scores_as_the_contract_does() -> None:
    values = np.array([np.nan, -np.inf, -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3e38, np.inf], np.float32)
    clean = np.where(values == 0, np.float32(0), values)
    bits = clean.view(np.uint32)
    keys = np.where(bits >> 31 == 1, ~bits, bits | np.uint32(0x80000000)).astype(np.uint64) << np.uint64(32)
    keys = np.where(np.isnan(values), np.uint64(1), keys)
    assert (np.diff(keys.astype(object)) >= 0).all()
    assert keys[5] == keys[6] and len(set(keys.tolist())) == len(keys) - 1 and keys.min() == 1


@pytest.mark.parametrize("seed", range(4))
def test_screen_of_fours_finds_the_best_and_bounds_the_rest(seed: int) -> None:
    """max_of_four on float bits, then the place within the four: forward.cuh, MODE_SCREEN."""
    rng = np.random.default_rng(seed)
    for _ in range(300):
        values = rng.integers(-3, 4, 16).astype(np.float32) * np.float32(rng.choice([1, 0.25]))
        bits = (values + np.float32(0)).view(np.int32)  # no -0
        best = other = -1
        four, kept = 0, [0, 0, 0, 0]
        for j in range(4):
            group = bits[4 * j : 4 * j + 4]
            high = max(group)
            lower, new = min(best, high), max(best, high)
            if new != best:
                four, kept = j, list(group)
            best, other = new, max(other, lower)
        if best < 0:
            assert (values < 0).all()  # the kernel then looks at floats
            continue
        place = next(i for i in range(4) if kept[i] == best)
        rest = max(other, *(kept[i] for i in range(4) if i != place), 0)
        column = 4 * four + place
        assert values[column] == values.max() and column == int(values.argmax())
        assert np.int32(rest).view(np.float32) >= np.delete(values, column).max(initial=-np.inf)


def test_screen_insertion_keeps_two_candidates_and_bounds_the_rest() -> None:
    rng = random.Random(6)
    for _ in range(500):
        stream = [(rng.randint(0, 9), i) for i in range(rng.randint(1, 12))]
        value = second = third = -1
        index = second_index = -1
        for v, i in stream:
            third = max(third, min(second, v))
            if v > value:
                second, second_index, value, index = value, index, v, i
            elif v > second:
                second, second_index = v, i
        ranked = sorted((v for v, _ in stream), reverse=True) + [-1, -1]
        assert [value, second, third] == ranked[:3]
        assert stream[index][0] == value and (second == -1 or stream[second_index][0] == second)


# ------------------------------------------------------------------------------------- barriers


class Barrier:
    """An mbarrier: a phase ends when its arrivals are in; a wait for parity p passes while the phase is not p."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.phase = 0

    def arrive(self) -> None:
        self.pending -= 1
        assert self.pending >= 0, "an arrival too many"
        if self.pending == 0:
            self.pending, self.phase = self.count, self.phase ^ 1

    def passes(self, parity: int) -> bool:
        return self.phase != parity


@pytest.mark.parametrize("seed", range(20))
def test_ring_and_sums_in_random_interleavings(seed: int) -> None:
    """Producer, consumers and the summing warp with the kernels' phase arithmetic: no deadlock, nothing lost."""
    rng = random.Random(seed)
    stages, slots, warps = rng.randint(2, 6), 4, rng.choice([4, 8])
    documents = [rng.randint(0, 5) for _ in range(30)]  # tiles; an empty one still takes a stage
    tiles = [(d, t, t == max(n, 1) - 1) for d, n in enumerate(documents) for t in range(max(n, 1))]
    full, empty = [Barrier(1) for _ in range(stages)], [Barrier(warps) for _ in range(stages)]
    sum_full, sum_empty = [Barrier(warps) for _ in range(slots)], [Barrier(1) for _ in range(slots)]
    ring: list[tuple[int, int, bool] | None] = [None] * stages
    parts: list[dict[int, int]] = [{} for _ in range(slots)]
    results: deque[int] = deque()

    def producer():
        stage = phase = 0
        for tile in tiles:
            while not empty[stage].passes(phase ^ 1):
                yield
            ring[stage] = tile
            full[stage].arrive()
            stage += 1
            if stage == stages:
                stage, phase = 0, phase ^ 1
            yield

    def consumer(warp: int):
        stage = phase = slot = sum_phase = 0
        for tile in tiles:
            while not full[stage].passes(phase):
                yield
            assert ring[stage] == tile
            empty[stage].arrive()
            stage += 1
            if stage == stages:
                stage, phase = 0, phase ^ 1
            yield
            if not tile[2]:
                continue
            while not sum_empty[slot].passes(sum_phase ^ 1):
                yield
            parts[slot][warp] = tile[0]
            sum_full[slot].arrive()
            slot += 1
            if slot == slots:
                slot, sum_phase = 0, sum_phase ^ 1
            yield

    def summer():
        slot = phase = 0
        for _ in documents:
            while not sum_full[slot].passes(phase):
                yield
            assert len(parts[slot]) == warps and len(set(parts[slot].values())) == 1
            results.append(parts[slot][0])
            parts[slot].clear()
            sum_empty[slot].arrive()
            slot += 1
            if slot == slots:
                slot, phase = 0, phase ^ 1
            yield

    actors = [producer(), summer(), *(consumer(warp) for warp in range(warps))]
    for _ in range(200_000):
        if not actors:
            break
        actor = rng.choice(actors)
        if next(actor, "done") == "done":
            actors.remove(actor)
    assert not actors, "deadlock"
    assert list(results) == list(range(len(documents)))


# ------------------------------------------------------------------------------------- launch table


@pytest.mark.parametrize("mode", [launch_table.SCORE, launch_table.ARGMAX, launch_table.SCREEN])
def test_every_variant_fits_a_multiprocessor(mode: int) -> None:
    for variant in launch_table.all_variants(mode, tuple(range(8, 4097, 8))):
        assert variant.stages >= 2 and variant.rows <= launch_table.MAX_QUERY_ROWS
        assert variant.ctas * (variant.shared_bytes + 4096) <= 228 * 1024, variant


def test_a_new_depth_of_a_class_compiles_nothing() -> None:
    for low, high in ((8, 64), (72, 96), (104, 128)):
        macros = {repr(launch_table.forward(256, stride, 0).macros(0, "bf16")) for stride in range(low, high + 1, 8)}
        assert len(macros) == 1
    for low, high in ((8, 64), (72, 128)):
        macros = {repr(launch_table.forward(64, stride, 0).macros(0, "bf16")) for stride in range(low, high + 1, 8)}
        assert len(macros) == 1
    deep = {repr(launch_table.forward(256, stride, 0).macros(0, "bf16")) for stride in range(136, 4097, 8)}
    assert len(deep) == 2  # queries resident or streamed


@pytest.mark.parametrize("mode", [launch_table.SCORE, launch_table.ARGMAX, launch_table.SCREEN])
def test_depth_classes_pick_every_variant(mode: int) -> None:
    def macros(strides: tuple[int, ...]) -> set[str]:
        return {repr((v.source, v.macros(mode, "f16"))) for v in launch_table.all_variants(mode, strides)}

    assert macros(launch_table.DEPTH_CLASSES) == macros(tuple(range(8, 4097, 8)))


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_parameter_structs_have_the_sizes_of_the_kernels() -> None:
    """Offsets are implied by native alignment on both sides; what a kernel appends must be appended here."""
    from numkong_py.cuda import collection, scoring, search

    assert scoring.FORWARD.size == 2 * 128 + 15 * 8 + 8 + 13 * 4
    assert scoring.GENERAL.size == 2 * (5 * 8 + 8 + 2 * 4) + 6 * 8 + 8 + 2 * 8 + 7 * 4
    assert scoring.FORWARD_LOUD_AT == 2 * 128 + 13 * 8 and scoring.GENERAL_OUTPUTS_AT == 2 * (5 * 8 + 8 + 2 * 4) + 8
    assert scoring.COMBINE.size == 9 * 8 + 8 + 5 * 4
    assert scoring.REFINE.size == 15 * 8 + 8 + 4 * 4
    assert collection.STATS.size == 5 * 8 + 8 + 4 * 4
    assert collection.NORMALIZE.size == 8 + 8 + 2 * 4
    assert search.PARAMETERS.size == 4 * 8 + 4 * 8 + 2 * 4
