"""Index arithmetic of the gradient and Chamfer kernels, emulated in NumPy: runs without a GPU, costs no device time.

Each function here is the kernel's expression with threads as an axis; a change in a kernel belongs here as well.
"""

from __future__ import annotations

import numpy as np
import pytest

WARPS, LANES_OF_WARP, THREADS = 8, 32, 256
WINDOW = BATCH = 2048
OWNED, TURNS = 256, 2


# ------------------------------------------------------------------------------------- the inverse map


def rank_in_run(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ranks among equal keys before, for one warp's keys [k, lane], and the histogram that is left (`rank_in_run`)."""
    tally, ranks = np.zeros(OWNED + 1, int), np.zeros(keys.shape, int)
    for k, row in enumerate(keys):
        peers = row[:, None] == row[None, :]
        below = np.tril(np.ones((LANES_OF_WARP, LANES_OF_WARP), bool), -1)
        ranks[k] = np.where(row < OWNED, tally[row], 0) + (peers & below).sum(1)
        leaders = (row < OWNED) & ~(peers & below).any(1)
        tally[row[leaders]] += peers.sum(1)[leaders]
    return ranks, tally[:OWNED]


def append(winner: np.ndarray, base: int, first: int, owned: int) -> list[tuple[int, int]]:
    """(source, key) in the order in which a window is appended (`Inverse::append`); winner [turn, thread, j]."""
    mine = (winner >= first) & (winner < first + owned)
    runs = mine.reshape(TURNS, WARPS, LANES_OF_WARP, 4)
    counts = runs.sum((2, 3)).reshape(-1)  # run = 8 k + warp
    before = np.cumsum(counts) - counts
    placed: dict[int, tuple[int, int]] = {}
    for k in range(TURNS):
        for warp in range(WARPS):
            lanes = runs[k, warp].sum(1)
            rank = np.cumsum(lanes) - lanes  # four ballots, each counted below the lane
            for lane in np.flatnonzero(lanes):
                at, thread = before[k * WARPS + warp] + rank[lane], warp * LANES_OF_WARP + lane
                for j in np.flatnonzero(runs[k, warp, lane]):
                    placed[at] = (base + 4 * (k * THREADS + thread) + j, winner[k, thread, j] - first)
                    at += 1
    return [placed[i] for i in range(len(placed))]


def sort(entries: list[tuple[int, int]]) -> tuple[list[int], np.ndarray]:
    """Sources by destination, and where each destination's begin (`Inverse::sort`)."""
    count = len(entries)
    each = -(-count // THREADS)
    index = np.arange(WARPS)[:, None, None] * each + np.arange(each)[None, :, None]
    index = index * LANES_OF_WARP + np.arange(LANES_OF_WARP)
    keys = np.full(index.shape, OWNED)
    inside = index < count
    keys[inside] = np.array([key for _, key in entries], int)[index[inside]]
    ranks, tallies = zip(*(rank_in_run(one) for one in keys)) if each else ((), np.zeros((WARPS, OWNED), int))
    tallies = np.array(tallies)
    within = np.cumsum(tallies, 0) - tallies
    total = tallies.sum(0)
    start = np.concatenate([[0], np.cumsum(total)])
    placed = np.full(count, -1)
    for warp in range(WARPS if each else 0):
        for k, lane in zip(*np.nonzero(inside[warp])):
            key = keys[warp, k, lane]
            at = start[key] + within[warp, key] + ranks[warp][k, lane]
            assert placed[at] == -1
            placed[at] = entries[index[warp, k, lane]][0]
    return list(placed), start


@pytest.mark.parametrize("sources, longest", [(0, 3), (1, 1), (700, 300), (2048, 257), (9000, 700)])
@pytest.mark.parametrize("skew", [False, True])
def test_the_inverse_map_is_the_stable_order_by_destination(sources: int, longest: int, skew: bool) -> None:
    """Every part of a document, batch after batch: the sources that won each token, in ascending order."""
    rng = np.random.default_rng(sources + longest)
    winners = rng.integers(-1, longest, sources)
    if skew:
        winners[: sources // 2] = longest // 2
    owned_rows = 64 if sources > BATCH else 256
    parts = -(-longest // owned_rows)
    each = -(-longest // parts)
    for part in range(parts):
        first, owned = part * each, min(each, longest - part * each)
        if owned <= 0:
            continue
        found: list[list[int]] = [[] for _ in range(owned)]
        entries: list[tuple[int, int]] = []
        for base in range(0, max(sources, 1), WINDOW):
            window = np.full(WINDOW, -1)
            window[: len(winners[base : base + WINDOW])] = winners[base : base + WINDOW]
            entries += append(window.reshape(TURNS, THREADS, 4), base, first, owned)
            assert len(entries) < 2 * BATCH
            while len(entries) >= BATCH or (base + WINDOW >= sources and entries):
                ordered, start = sort(entries[:BATCH])
                for local in range(owned):
                    found[local] += ordered[start[local] : start[local + 1]]
                entries = entries[BATCH:]
        for local in range(owned):
            np.testing.assert_array_equal(found[local], np.flatnonzero(winners == first + local))


def divisor(by: int) -> tuple[int, int]:
    shift = (by - 1).bit_length()
    return (2**32 * (2**shift - by) // by + 1) % 2**32, shift


def test_division_by_multiplication_is_exact() -> None:
    rng = np.random.default_rng(1)
    for by in [*range(1, 300), 1000003, 2**20, 2**31 - 1, 2**31]:
        magic, shift = divisor(by)
        edges = [0, 1, by - 1, by, by + 1, 2**31 - 1, 2**32 - 1, *(k * by - 1 for k in range(1, 9))]
        for n in [n % 2**32 for n in edges] + rng.integers(0, 2**32, 40).tolist():
            high = magic * n >> 32
            assert (((n - high >> 1) + high) >> (shift - 1) if shift else n) == n // by


# ------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("lanes", [8, 16])
def test_columns_of_a_row_have_one_lane_each(lanes: int) -> None:
    lane, x = np.mgrid[0:lanes, 0:8]
    for column in (8 * lane + x, np.where(x < 4, 4 * lane, 4 * (lanes + lane) - 4) + x, x * lanes + lane):
        assert sorted(column.ravel()) == list(range(8 * lanes))


@pytest.mark.parametrize("mask", [[1, 0, 1, 1, 0, 0, 1, 0], [0] * 8, [1] * 8, [0, 0, 1, 0, 0, 0, 0, 0], [1] + [0] * 7])
def test_padding_is_written_once_by_the_token_before_it(mask: list[int]) -> None:
    """`store_row` and `store_padding`, for every token of a padded set."""
    length, base = len(mask), 3 * len(mask)
    places = base + np.flatnonzero(mask)
    count, written = len(places), np.zeros(5 * length, int)
    for position in range(max(count, 1)):
        place = places[position] if count else -1
        following = base + length if position + 1 >= count else places[position + 1]
        for row in range(place + 1 if position else base, following):
            written[row] += row != place
        if count:
            written[place] += 1
    assert (written[base : base + length] == 1).all() and written.sum() == length


@pytest.mark.parametrize("slots", [1, 63, 64, 65, 128, 1000, 1024, 1025, 40000])
def test_slices_cover_the_slots_in_whole_chunks(slots: int) -> None:
    count = min(16, -(-slots // 64))
    least = -(-slots // count)
    each = max(-(-least // 64) * 64, 64)
    slices = -(-slots // each)
    assert slices <= 16 and each % 64 == 0 and (slices - 1) * each < slots <= slices * each


# ------------------------------------------------------------------------------------- clouds


@pytest.mark.parametrize("size", [32, 64, 1024])
def test_tiles_are_numbered_without_a_table(size: int) -> None:
    rng = np.random.default_rng(size)
    for lengths in (rng.integers(0, 3 * size, 40), np.full(7, size), np.zeros(5, int), np.array([0, 5000, 0, 1])):
        start = np.concatenate([[0], np.cumsum(lengths)])
        first = start[:-1] // size + np.arange(len(lengths))
        slots = start[-1] // size + len(lengths)
        found = []
        for slot in range(slots):
            chosen = np.searchsorted(first, slot, side="right") - 1  # `set_of_tile`: the last set that begins by then
            if (slot - first[chosen]) * size < lengths[chosen]:
                found.append((chosen, slot - first[chosen]))
        wanted = [(s, t) for s, length in enumerate(lengths) for t in range(-(-length // size))]
        assert found == wanted


def spread(bits: np.ndarray) -> np.ndarray:
    for shift, keep in ((16, 0x030000FF), (8, 0x0300F00F), (4, 0x030C30C3), (2, 0x09249249)):
        bits = (bits | bits << shift) & keep
    return bits


def test_morton_bits_go_to_every_third_place() -> None:
    x = np.arange(1024)
    wanted = sum(((x >> k) & 1) << (3 * k) for k in range(10))
    np.testing.assert_array_equal(spread(x), wanted)


def test_box_distances_never_exceed_distances_after_rounding() -> None:
    """What lets a search pass a box by: the same rounded operations, each of them monotone."""
    rng = np.random.default_rng(5)

    def squared(d: np.ndarray) -> np.ndarray:
        total = np.float32(d[..., 0] * d[..., 0])
        for k in (1, 2):
            total = (d[..., k].astype(np.float64) ** 2 + total).astype(np.float32)
        return total

    for scale, offset in ((1, 0), (1e-3, 1000), (1e5, -1e6)):
        p = (rng.standard_normal((400, 1, 3)) * scale + offset).astype(np.float32)
        q = (rng.standard_normal((1, 32, 3)) * scale * 0.3 + offset).astype(np.float32)
        low, high = q.min(1, keepdims=True), q.max(1, keepdims=True)
        gap = np.maximum(np.maximum(low - p, p - high), np.float32(0))
        assert (squared(gap)[:, 0] <= squared(p - q).min(1)).all()
