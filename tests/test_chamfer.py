"""The Chamfer distance and its gradient: the reference's bits for every row, layout and kind of data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import DTYPES, KINDS, REDUCTIONS, assert_same_bits, lay_out, read, tokens

import numkong_py as nk
from numkong_py import neighbours, reference
from numkong_py.sides import side_of

ROWS = [row for row in nk.backends() if row.device == "cpu" and row.available]
LAYOUTS = ("list", "offsets", "lengths", "mask")
SWITCHES = [(squared, both) for squared in (True, False) for both in (True, False)]


def clouds(kind: str, dtype: str, counts: list[int], depth: int, seed: int) -> list[np.ndarray]:
    return [tokens(kind, dtype, count, depth, seed + index) for index, count in enumerate(counts)]


def random_clouds(counts: tuple[int, int], depth: int, seed: int = 0, offset: float = 0.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((count, depth)) + offset).astype(np.float32) for count in counts]


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal to float64 rounding: the order of a sum of neighbours' pulls is the only freedom."""
    scale = np.abs(expected).max(initial=0.0)
    np.testing.assert_allclose(actual, expected, rtol=2.0**-22, atol=scale * 2.0**-45)


LAYOUT_PAIRS = [(p, q) for p in LAYOUTS for q in LAYOUTS]


@pytest.mark.parametrize("p_layout, q_layout", LAYOUT_PAIRS)
def test_every_layout(p_layout: str, q_layout: str) -> None:
    """Types take turns."""
    dtype = tuple(DTYPES)[LAYOUT_PAIRS.index((p_layout, q_layout)) % 3]
    p = lay_out(clouds("random", dtype, [5, 0, 60, 3, 0, 1], 3, 1), p_layout)
    q = lay_out(clouds("random", dtype, [9, 4, 30, 1, 0, 0], 3, 50), q_layout, 1)
    sides = [nk.collection(side.x, **side.keywords) for side in (p, q)]
    upstream = np.array([1.0, -2.0, 0.5, 0.0, 1.0, 3.0])
    for squared, both in SWITCHES:
        for reduction in REDUCTIONS:
            options: dict[str, Any] = {"squared": squared, "both": both, "reduction": reduction}
            found = nk.chamfer(*sides, **options, return_nearest=True)
            assert_same_bits(found.distances, reference.chamfer(read(p), read(q), **options))
            assert_same_bits(nk.chamfer(*sides, **options), found.distances)
            expected = reference.chamfer_grad(read(p), read(q), upstream, **options)
            actual = nk.chamfer_grad(*sides, upstream, **options)
            kept = nk.chamfer_grad(*sides, upstream, nearest=found[1:], **options)
            for gradient, again, wanted in zip(actual, kept, expected):
                assert gradient.shape == wanted.shape
                assert_close(gradient, wanted)
                assert_same_bits(again, gradient)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_every_kind_of_data_to_the_bit(row: Any, kind: str) -> None:
    """Every row against the reference: distances and the lowest of equal neighbours."""
    for dtype in row.dtypes:
        for depth, counts in ((1, (20, 70)), (3, (9, 300)), (16, (5, 31)), (50, (5, 40))):
            p, q = (tokens(kind, dtype, count, depth, seed) for seed, count in enumerate(counts))
            packed = [nk.pack(side, backend=row.name) for side in (p, q)]
            assert packed[0].backend == row.name
            found = nk.chamfer(*packed, return_nearest=True)
            with np.errstate(all="ignore"):
                nearest = [reference._nearest(*sides) for sides in ((p, q), (q, p))]
            assert_same_bits(found.nearest_of_p, nearest[0][0].astype(np.int32), "nearest_of_p")
            assert_same_bits(found.nearest_of_q, nearest[1][0].astype(np.int32), "nearest_of_q")
            sums = [reference._score(squares, "mean", np.dtype(np.float64)) for _, squares in nearest]
            assert_same_bits(np.asarray(found.distances), np.asarray(sums[0] + sums[1]), f"{dtype} depth {depth}")


def test_clouds_larger_than_a_chunk_and_a_segment() -> None:
    p, q = random_clouds((37, 12_000), 3)
    for threads in (1, 3):
        found = side_of_row("serial", p, q), side_of_row(ROWS[0].name, p, q, threads)
        for exact, actual in zip(*found):
            assert_same_bits(actual, exact)


def side_of_row(row: str, p: np.ndarray, q: np.ndarray, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours of p by a row's differences."""
    found = next(each for each in ROWS if each.name == row)
    return found.nearest(side_of(nk.collection(p)), side_of(nk.collection(q)), threads)


# ------------------------------------------------------------------------------------------------ the tree


def hard_clouds() -> dict[str, list[np.ndarray]]:
    """Where a tree's own rounding, or ties, would choose another neighbour."""
    rng = np.random.default_rng(1)
    return {
        "random": random_clouds((500, 700), 3),
        "far from the origin": random_clouds((500, 700), 3, offset=1000.0),
        "a grid": [rng.integers(0, 6, (count, 3)).astype(np.float32) for count in (400, 500)],
        "one place": [np.ones((300, 2), np.float32)] * 2,
        "depth 16": random_clouds((200, 300), 16),
        "tiny": [cloud * np.float32(1e-38) for cloud in random_clouds((200, 300), 4)],
        "huge": [cloud * np.float32(1e37) for cloud in random_clouds((200, 300), 4)],
        "one point": random_clouds((5, 1), 3),
        "rings": [np.float32([[np.cos(t), np.sin(t)] for t in rng.random(n) * 7]) for n in (1, 900)],
    }


@pytest.mark.parametrize("name", hard_clouds())
def test_the_tree_gives_the_bits_of_the_differences(name: str) -> None:
    pytest.importorskip("scipy", reason="the k-d tree needs the chamfer extra: pip install scipy")
    p, q = hard_clouds()[name]
    for points, others in ((p, q), (q, p)):
        found = neighbours._by_tree(ROWS[0], points, others, 1)
        for actual, exact in zip(found, side_of_row("serial", points, others)):
            assert_same_bits(actual, exact, name)


def test_the_tree_is_taken_where_it_wins_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy", reason="the k-d tree needs the chamfer extra: pip install scipy")
    by_tree, probes = [], []
    monkeypatch.setattr(neighbours, "_by_tree", lambda *given: by_tree.append(1) or side_of_row("serial", *given[1:3]))
    monkeypatch.setattr(neighbours, "_probe", lambda *given: probes.append(1) or False)
    count = neighbours.TREE_POINTS
    nk.chamfer(*random_clouds((count, count), 3), both=False)
    assert (by_tree, probes) == ([1], [])
    nk.chamfer(*random_clouds((count - 1, count), 3), both=False)
    poisoned = random_clouds((count, count), 3)
    poisoned[0][5, 1] = np.nan
    assert np.isnan(nk.chamfer(*poisoned))
    nk.chamfer(*random_clouds((count, count), 16), both=False)
    assert (by_tree, probes) == ([1], [])
    nk.chamfer(*random_clouds((neighbours.PROBE_POINTS,) * 2, 16), both=False)
    assert (by_tree, probes) == ([1], [1])


@pytest.mark.parametrize(("tree", "differences"), [(1.0, 100.0), (1.0, 1.1)])
def test_the_probe_takes_the_cheaper_way(monkeypatch: pytest.MonkeyPatch, tree: float, differences: float) -> None:
    pytest.importorskip("scipy", reason="the k-d tree needs the chamfer extra: pip install scipy")
    clock = iter((0.0, tree, tree + differences))
    monkeypatch.setattr(neighbours.time, "thread_time", lambda: next(clock))
    clouds = [np.random.default_rng(seed).random((500, 48), dtype=np.float32) for seed in range(2)]
    chosen = neighbours._probe(ROWS[0], *(side_of(nk.collection(cloud)) for cloud in clouds))
    assert chosen == (neighbours.TREE_OVERHEAD * tree < differences) == (differences > 50)


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_finite_differences_of_the_reference(squared: bool, reduction: str) -> None:
    rng = np.random.default_rng(4)
    sides = [rng.standard_normal((count, 3)) for count in (4, 6)]
    options: dict[str, Any] = {"squared": squared, "reduction": reduction}
    gradients = reference.chamfer_grad(*sides, 2.0, **options)
    for side in (0, 1):
        for place in np.ndindex(sides[side].shape):
            values = []
            for sign in (1, -1):
                moved = [cloud.copy() for cloud in sides]
                moved[side][place] += sign * 1e-6
                values.append(2.0 * reference.chamfer(*moved, **options))
            np.testing.assert_allclose(gradients[side][place], (values[0] - values[1]) / 2e-6, rtol=1e-6, atol=1e-8)


def test_offset_of_a_thousand_changes_nothing() -> None:
    """Coordinates on a grid of 2^-13, so that adding 1000 rounds nothing: the differences are the same."""
    rng = np.random.default_rng(5)
    near = [rng.integers(-8192, 8192, (count, 3)).astype(np.float32) * np.float32(2.0**-13) for count in (500, 600)]
    far = [cloud + np.float32(1000) for cloud in near]
    for squared in (True, False):
        assert_same_bits(np.asarray(nk.chamfer(*far, squared=squared)), np.asarray(nk.chamfer(*near, squared=squared)))
        pairs = zip(nk.chamfer_grad(*far, squared=squared), nk.chamfer_grad(*near, squared=squared))
        for actual, wanted in pairs:
            assert_same_bits(actual, wanted)


def test_coinciding_points_have_no_slope() -> None:
    p, q = np.float32([[1, 2], [5, 5]]), np.float32([[1, 2], [5, 6]])
    gradients = nk.chamfer_grad(p, q, squared=False, reduction="sum")
    assert gradients[0].tolist() == [[0, 0], [0, -2]]
    assert gradients[1].tolist() == [[0, 0], [0, 2]]


def test_bits_depend_on_no_thread_and_no_batch() -> None:
    pairs = [random_clouds((count, 2 * count + 1), 5, seed) for seed, count in enumerate((30, 1, 200, 77))]
    p, q = ([pair[side] for pair in pairs] for side in (0, 1))
    first = nk.chamfer(p, q, return_nearest=True), nk.chamfer_grad(p, q)
    for threads in (*range(1, 7), *[4] * 14):
        for actual, wanted in zip(nk.chamfer(p, q, threads=threads, return_nearest=True), first[0]):
            assert_same_bits(actual, wanted)
        for actual, wanted in zip(nk.chamfer_grad(p, q, threads=threads), first[1]):
            assert_same_bits(actual, wanted)
    for index, pair in enumerate(pairs):
        assert float(nk.chamfer(*pair)) == first[0].distances[index]


def test_one_side_one_direction_and_the_input_type() -> None:
    p, q = (tokens("random", "bf16", count, 7, 3) for count in (20, 30))
    both = nk.chamfer_grad(p, q, grad_dtype="bf16")
    wanted = reference.chamfer_grad(p, q)
    for need, side in (("p", 0), ("q", 1)):
        only = nk.chamfer_grad(p, q, need=need, grad_dtype=p.dtype)
        assert only[1 - side] is None
        assert_same_bits(only[side], both[side])
        assert_same_bits(only[side], reference.rounded(wanted[side], p.dtype))
    result = nk.chamfer(p, q, both=False, return_nearest=True)
    assert result.nearest_of_q is None
    again = nk.chamfer_grad(p, q, both=False, nearest=result[1:])
    for actual, expected in zip(again, nk.chamfer_grad(p, q, both=False)):
        assert_same_bits(actual, expected)


def test_silent_clouds_hide_nan() -> None:
    p, q = [np.full((3, 2), np.nan, np.float32), np.ones((2, 2), np.float32)], [np.ones((2, 2), np.float32)] * 2
    assert all(np.isfinite(gradient).all() for gradient in nk.chamfer_grad(p, q, [0.0, 1.0]))
    assert [g.shape for g in nk.chamfer_grad(np.zeros((0, 2), np.float32), q[0])] == [(0, 2), (2, 2)]
    assert nk.chamfer(np.zeros((0, 2), np.float32), q[0]) == np.inf


def test_errors_name_the_argument_and_the_fix() -> None:
    p, q = random_clouds((4, 5), 3)
    nearest = np.zeros(4, int), np.zeros(5, int)
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (nk.InvalidArgument, "reduction: 'max', wanted one of sum, mean", {"reduction": "max"}),
        (nk.InvalidArgument, 'need: .*wanted "p", "q"', {"need": "queries"}),
        (
            nk.ShapeMismatch,
            "upstream: shape .2,., wanted one that broadcasts to .1,., the shape of the dist",
            {"upstream": [1, 2]},
        ),
        (nk.ShapeMismatch, "nearest: shapes", {"nearest": nearest[::-1]}),
        (nk.IndexOutOfRange, "nearest_of_p: names a point past", {"nearest": (nearest[0] + 5, nearest[1])}),
        (nk.UnsupportedDtype, "nearest_of_q", {"nearest": (nearest[0], nearest[1] * 1.0)}),
        (nk.UnsupportedDtype, "grad_dtype: bf16", {"grad_dtype": "bf16"}),
    ]
    for error, message, options in cases:
        with pytest.raises(error, match=message):
            nk.chamfer_grad(p, q, **options)
    with pytest.raises(nk.ShapeMismatch, match="p: 1 clouds, and q: 2 clouds"):
        nk.chamfer(p, [q, q])
    with pytest.raises(nk.ShapeMismatch, match="p: depth 3, and q: depth 2"):
        nk.chamfer(p, q[:, :2])
