"""GPU suite: scores, winners and bounds of the CUDA rows against float64 NumPy. One command: ``pytest -m gpu``."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from numkong_py import cuda
from numkong_py.errors import DeviceMismatch, ShapeMismatch, UnsupportedDtype

UNAVAILABLE = {row.name: row.reason for row in cuda.cuda_rows()}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(UNAVAILABLE["sm80"] is not None, reason=f"no CUDA row here: {UNAVAILABLE['sm80']}"),
]
ROWS = [
    pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=str(why))) for name, why in UNAVAILABLE.items()
]
NUMPY = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
RAGGED = [0, 1, 2, 63, 64, 65, 127, 128, 129, 193, 300, 0, 7, 700]


def upload(x: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(x.view(np.uint16) if x.dtype == NUMPY["bf16"] else x)


def collection(sets: list[np.ndarray], row: str, prepare: bool = True) -> cuda.CudaCollection:
    dtype = "bf16" if sets[0].dtype == NUMPY["bf16"] else None
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in sets])])
    packed = cuda.pack(upload(np.concatenate(sets)), offsets=offsets, dtype=dtype, row=row)
    if prepare:
        packed.prepare()
    return packed


def make(lengths: list[int], depth: int, dtype: str, seed: int, kind: str = "gauss") -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    sets = []
    for length in lengths:
        x = rng.standard_normal((length, depth)).astype(np.float32)
        if kind == "negative":
            x = (np.abs(x) + 0.01) * (1 if seed % 2 else -1)
        x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-30)
        if kind == "wide":
            span = 8 if dtype == "f16" else 20  # f16 must not overflow
            x *= np.exp2(rng.integers(-span, span, size=x.shape)).astype(np.float32)
        if kind == "repeated" and length:
            x = x[rng.integers(0, max(1, length // 8), size=length)]
        sets.append(x.astype(NUMPY[dtype]))
    return sets


def similarities(query: np.ndarray, document: np.ndarray, metric: str) -> np.ndarray:
    q, d = query.astype(np.float64), document.astype(np.float64)
    with np.errstate(all="ignore"):
        dot = q @ d.T
        if metric == "dot":
            return dot
        qq, dd = (q * q).sum(1)[:, None], (d * d).sum(1)[None]
        cosine = np.where((qq == 0) | (dd == 0), 0.0, dot / np.sqrt(qq * dd)).clip(-1, 1)
        if metric == "cosine":
            return cosine
        return np.where((qq == 0) & (dd == 0), 0.0, np.maximum(0.0, 1 - cosine))


def lanes_dot(query: np.ndarray, document: np.ndarray) -> np.ndarray:
    """The contract's f64 dot of all pairs: element k to lane k mod 16, folded by 8, 4, 2, 1."""
    depth = query.shape[1]
    padded = -depth % 16
    q = np.pad(query.astype(np.float64), ((0, 0), (0, padded)))
    d = np.pad(document.astype(np.float64), ((0, 0), (0, padded)))
    lanes = np.zeros((len(q), len(d), 16))
    for k in range(0, depth + padded, 16):
        lanes += q[:, None, k : k + 16] * d[None, :, k : k + 16]
    for step in (8, 4, 2, 1):
        lanes = lanes[..., :step] + lanes[..., step : 2 * step]
    return lanes[..., 0]


def tree_sum(maxima: np.ndarray) -> float:
    """The fixed tree over 16-row groups, groups in ascending order."""
    padded = np.pad(maxima, (0, -len(maxima) % 16)).reshape(-1, 16)
    total = 0.0
    for rows in padded:
        s = rows[:8] + rows[8:]
        for _ in range(3):
            s = s[0::2] + s[1::2]
        total += s[0]
    return total


def check(
    queries: list[np.ndarray], documents: list[np.ndarray], row: str, metric: str = "dot", mean: bool = False
) -> None:
    q, d = collection(queries, row), collection(documents, row)
    options = {"metric": metric, "reduction": "mean" if mean else "sum"}
    plain = cuda.score(q, d, **options).scores.get()
    full = cuda.score(q, d, **options, return_argmax=True, return_token_scores=True, return_bounds=True)
    scores, argmax, token_scores, bounds = (array.get() for array in full)
    np.testing.assert_array_equal(plain, scores, err_msg="asking for more changed the scores")
    worst = np.inf if metric == "angular" else -np.inf
    for i, query in enumerate(queries):
        for j, document in enumerate(documents):
            if not len(query) or not len(document):
                assert scores[i, j] == (worst if len(query) else 0), (i, j)
                assert (argmax[i, j] == -1).all()
                continue
            exact = similarities(query, document, metric)
            best = exact.min(1) if metric == "angular" else exact.max(1)
            total = best.mean() if mean else best.sum()
            assert abs(scores[i, j] - total) <= bounds[i, j], (i, j, scores[i, j], total, bounds[i, j])
            chosen = argmax[i, j, : len(query)]
            assert ((chosen >= 0) & (chosen < len(document))).all(), (i, j, chosen)
            assert (argmax[i, j, len(query) :] == -1).all() and (token_scores[i, j, len(query) :] == 0).all()
            slack = 2 * bounds[i, j] * (len(query) if mean else 1)
            assert (np.abs(exact[np.arange(len(query)), chosen] - best) <= slack).all(), (i, j)
            assert (np.abs(token_scores[i, j, : len(query)] - best) <= slack).all(), (i, j)


# ------------------------------------------------------------------------------------- against float64

QUERIES = [[32], [64], [77], [130], [32] * 3, [48] * 5, [300], [512, 512], [32] * 40, [16] * 4, [0, 5, 33, 1], [1]]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("queries", QUERIES, ids=lambda x: f"{len(x)}x{max(x)}")
def test_all_pairs(row: str, dtype: str, queries: list[int]) -> None:
    for kind in ("gauss", "negative", "repeated"):
        check(make(queries, 128, dtype, 1, kind), make(RAGGED, 128, dtype, 2, kind), row)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("depth", [1, 7, 16, 64, 65, 96, 100, 127, 136, 256, 384, 768, 1000, 4096])
def test_depths(row: str, dtype: str, depth: int) -> None:
    for queries in ([33, 7], [300]):
        check(make(queries, depth, dtype, 3), make([0, 1, 64, 65, 130, 200], depth, dtype, 4), row)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("metric", ["cosine", "angular"])
def test_normalised_metrics(row: str, dtype: str, metric: str) -> None:
    for depth, kind in ((128, "gauss"), (128, "repeated"), (96, "negative"), (33, "wide")):
        queries, documents = make([32, 5, 0, 70], depth, dtype, 5, kind), make(RAGGED, depth, dtype, 6, kind)
        queries[0][3] = documents[5][7] = documents[5][8] = 0
        documents[6][4] = queries[1][2]
        check(queries, documents, row, metric)
        check(queries, documents, row, metric, mean=True)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_worst_error_is_small(dtype: str) -> None:
    queries, documents = make([128] * 4, 128, dtype, 7), make([300] * 100, 128, dtype, 8)
    row = next(name for name, why in UNAVAILABLE.items() if why is None)
    scores = cuda.score(collection(queries, row), collection(documents, row)).scores.get()
    exact = np.array([[similarities(q, d, "dot").max(1) for d in documents] for q in queries])
    error = np.abs(scores - exact.sum(2)) / np.abs(exact).sum(2)
    assert error.max() < 1e-6
    assert (np.argsort(-scores)[:, :20] == np.argsort(-exact.sum(2))[:, :20]).all()


# ------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", ["gauss", "repeated", "wide"])
@pytest.mark.parametrize("depth", [128, 100])
def test_f32_has_the_bits_of_the_f64_dot(row: str, kind: str, depth: int) -> None:
    queries, documents = make([32, 70], depth, "f32", 9, kind), make([64, 1, 300, 129], depth, "f32", 10, kind)
    result = cuda.score(
        collection(queries, row), collection(documents, row), return_argmax=True, return_token_scores=True
    )
    for i, query in enumerate(queries):
        for j, document in enumerate(documents):
            pairs = lanes_dot(query, document)
            np.testing.assert_array_equal(result.token_scores[i, j, : len(query)].get(), pairs.max(1))
            np.testing.assert_array_equal(result.argmax[i, j, : len(query)].get(), pairs.argmax(1))
            assert result.scores[i, j] == tree_sum(pairs.max(1))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_bits_do_not_depend_on_the_batch(row: str, dtype: str) -> None:
    queries, documents = make([32] * 5 + [20, 77], 128, dtype, 11), make(RAGGED, 128, dtype, 12)
    q, d = collection(queries, row), collection(documents, row)
    together = cuda.score(q, d).scores.get()
    for i, query in enumerate(queries):
        np.testing.assert_array_equal(cuda.score(collection([query], row), d).scores.get()[0], together[i])
    for j in range(0, len(documents), 3):
        np.testing.assert_array_equal(cuda.score(q, d[j : j + 2]).scores.get(), together[:, j : j + 2])
    order = np.random.default_rng(13).permutation(len(documents))
    shuffled = collection([documents[j] for j in order], row)
    np.testing.assert_array_equal(cuda.score(q, shuffled).scores.get(), together[:, order])
    long = collection(make([1000], 128, dtype, 14), row)  # cut into pieces alone, whole beside many
    many = collection(make([1000], 128, dtype, 14) + documents * 40, row)
    np.testing.assert_array_equal(cuda.score(q, many).scores.get()[:, 0], cuda.score(q, long).scores.get()[:, 0])


@pytest.mark.skipif(UNAVAILABLE["sm90"] is not None, reason=f"two instructions to compare: {UNAVAILABLE['sm90']}")
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("kind", ["gauss", "wide", "repeated"])
def test_wgmma_and_mma_have_the_same_bits(dtype: str, kind: str) -> None:
    """The sm90 row uses both: its pair value is one function only if they agree."""
    for depth in (64, 96, 128, 256, 768):
        queries, documents = make([1] * 256, depth, dtype, 15, kind), make([1] * 2000, depth, dtype, 16, kind)
        fast = cuda.score(collection(queries, "sm90"), collection(documents, "sm90")).scores.get()
        plain = cuda.score(collection(queries, "sm80"), collection(documents, "sm80")).scores.get()
        np.testing.assert_array_equal(fast, plain)


# ------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("length", [20, 32, 100, 260])
def test_candidates_and_pairs(row: str, dtype: str, length: int) -> None:
    import cupy

    queries, documents = make([length, 5, length], 128, dtype, 17), make(RAGGED, 128, dtype, 18)
    q, d = collection(queries, row), collection(documents, row)
    wanted = cuda.score(q, d, return_argmax=True)
    chosen = np.array([[3, 10, -1, 0, 13], [5, 5, 1, 99, 2], [10, 9, 8, 7, 6]])
    valid = (chosen >= 0) & (chosen < len(documents))
    for candidates in (chosen, cupy.asarray(chosen)):
        found = cuda.score(q, d, candidates=candidates, return_argmax=True)
        expected = np.take_along_axis(wanted.scores.get(), np.where(valid, chosen, 0), 1)
        np.testing.assert_array_equal(found.scores.get(), np.where(valid, expected, -np.inf))
        winners = np.take_along_axis(wanted.argmax.get(), np.where(valid, chosen, 0)[..., None], 1)
        np.testing.assert_array_equal(found.argmax.get(), np.where(valid[..., None], winners, -1))
    pairs = cuda.score(q, d[3:6], pairs=True).scores.get()[:, 0]
    np.testing.assert_array_equal(pairs, np.diagonal(wanted.scores.get()[:, 3:6]))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_padded_masked_and_strided_inputs(dtype: str) -> None:
    import cupy

    row = next(name for name, why in UNAVAILABLE.items() if why is None)
    name = "bf16" if dtype == "bf16" else None
    rng = np.random.default_rng(19)
    q = collection(make([32], 96, dtype, 20), row)
    padded = np.stack(make([50] * 6, 96, dtype, 21))
    mask = rng.random((6, 50)) < 0.6
    mask[2] = False
    want = cuda.score(q, collection([padded[i][mask[i]] for i in range(6)], row)).scores.get()
    for junk in (0, 1e4, np.inf, np.nan):
        dirty = padded.copy()
        dirty[~mask] = junk
        for given in (mask, mask.astype(np.int32), cupy.asarray(mask)):
            got = cuda.score(q, cuda.pack(upload(dirty), mask=given, dtype=name, row=row)).scores.get()
            np.testing.assert_array_equal(got, want)
    lengths = np.array([50, 0, 7, 33, 1, 50])
    want = cuda.score(q, collection([one[:n] for one, n in zip(padded, lengths)], row)).scores.get()
    strided = upload(np.ascontiguousarray(padded.transpose(2, 1, 0))).transpose(2, 1, 0)
    for x in (upload(padded), strided, upload(padded.repeat(2, 1))[:, ::2], upload(padded[:, ::-1].copy())[:, ::-1]):
        got = cuda.score(q, cuda.pack(x, lengths=lengths, dtype=name, row=row)).scores.get()
        np.testing.assert_array_equal(got, want)
    packed = cuda.pack(upload(padded), lengths=lengths, dtype=name, row=row)
    tokens, offsets = packed.to_host()
    assert (np.diff(offsets) == lengths).all()
    valid = np.concatenate([one[:n] for one, n in zip(padded, lengths)])
    np.testing.assert_array_equal(tokens.view(np.uint8), valid.view(np.uint8).reshape(tokens.view(np.uint8).shape))


# ------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("metric", ["dot", "cosine", "angular"])
def test_nan_reaches_its_own_scores_alone(row: str, dtype: str, metric: str) -> None:
    queries, documents = make([32, 32, 0], 128, dtype, 22), make([200, 200, 0, 70], 128, dtype, 23)
    queries[1][4, 100] = np.nan
    documents[1][150, 7] = documents[1][170, 9] = np.nan
    result = cuda.score(collection(queries, row), collection(documents, row), metric=metric, return_argmax=True)
    scores = result.scores.get()
    worst = np.inf if metric == "angular" else -np.inf
    assert np.isfinite(scores[0, [0, 3]]).all() and np.isnan(scores[0, 1])
    assert np.isnan(scores[1, [0, 1, 3]]).all()
    assert (scores[:2, 2] == worst).all() and (scores[2] == 0).all()
    assert (result.argmax[0, 1].get() == 150).all()  # the lowest NaN token


@pytest.mark.parametrize("row", ROWS)
def test_infinities_follow_ieee(row: str) -> None:
    for dtype in ("bf16", "f16", "f32"):
        queries, documents = make([4], 64, dtype, 24, "negative"), make([10, 70], 64, dtype, 25, "negative")
        documents[0][3, 5] = -np.inf  # the queries are negative
        documents[1][66, 5] = np.inf
        scores = cuda.score(collection(queries, row), collection(documents, row)).scores.get()[0]
        assert scores[0] == np.inf and np.isfinite(scores[1])


@pytest.mark.parametrize("row", ROWS)
def test_finite_inputs_never_give_nan(row: str) -> None:
    for prepare in (True, False):
        queries, documents = make([32, 3], 128, "bf16", 26), make([70, 200, 64], 128, "bf16", 27)
        queries[0][5] *= 2.0**100
        documents[1][60:80] *= 2.0**100
        documents[1][70] *= -1
        q, d = collection(queries, row, prepare), collection(documents, row, prepare)
        scores = cuda.score(q, d, return_argmax=True, return_token_scores=True, return_bounds=True)
        assert not np.isnan(scores.scores.get()).any()
        quiet = cuda.score(collection(queries[1:], row), collection(documents[::2], row)).scores.get()
        np.testing.assert_array_equal(scores.scores.get()[1:, ::2], quiet)
        for i, query in enumerate(queries):
            for j, document in enumerate(documents):
                exact = similarities(query, document, "dot")
                chosen = scores.argmax[i, j, : len(query)].get()
                slack = 2.0**-16 * np.abs(query.astype(float)) @ np.abs(document.astype(float)).T
                assert (exact[np.arange(len(query)), chosen] >= exact.max(1) - slack.max(1)).all()
                with np.errstate(over="ignore"):
                    np.testing.assert_allclose(scores.scores[i, j].get(), np.float32(exact.max(1).sum()), rtol=1e-4)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_ties_go_to_the_lowest_token(row: str, dtype: str) -> None:
    document = np.tile(make([16], 128, dtype, 28)[0], (20, 1))
    for query in (make([40], 128, dtype, 29)[0], np.zeros((40, 128), NUMPY[dtype])):
        result = cuda.score(collection([query], row), collection([document, -document], row), return_argmax=True)
        argmax = result.argmax.get()[0]
        assert (argmax < 16).all()
        if not query.astype(float).any():
            assert (argmax == 0).all()


@pytest.mark.parametrize("row", ROWS)
def test_extreme_f32(row: str) -> None:
    rng = np.random.default_rng(30)
    queries, documents = make([20], 40, "f32", 31), make([30, 100], 40, "f32", 32)
    queries[0][3] *= 1e30
    queries[0][4] *= 1e-38
    documents[1][50] *= 1e38
    documents[1][51] = 0
    documents[0] *= np.float32(1e-30)
    documents[1][::7] *= np.float32(rng.random() * 1e-20)
    result = cuda.score(
        collection(queries, row), collection(documents, row), return_argmax=True, return_token_scores=True
    )
    for j, document in enumerate(documents):
        pairs = lanes_dot(queries[0], document)
        np.testing.assert_array_equal(result.token_scores[0, j].get(), pairs.max(1))
        np.testing.assert_array_equal(result.argmax[0, j].get(), pairs.argmax(1))


def test_empty_value_mean_and_out() -> None:
    import cupy

    row = next(name for name, why in UNAVAILABLE.items() if why is None)
    q, d = collection(make([32, 0], 128, "f16", 33), row), collection(make([5, 0, 9], 128, "f16", 34), row)
    out = cupy.full((2, 3), 7, np.float32)
    scores = cuda.score(q, d, empty=-5.0, reduction="mean", out=out).scores
    assert scores is out
    assert scores.get()[0, 1] == -5 and (scores.get()[1] == 0).all()
    np.testing.assert_allclose(scores.get()[0, ::2] * 32, cuda.score(q, d).scores.get()[0, ::2], rtol=1e-6)
    with pytest.raises(ShapeMismatch, match="out"):
        cuda.score(q, d, out=out[:1])


def test_errors_name_what_came() -> None:
    import cupy

    row = next(name for name, why in UNAVAILABLE.items() if why is None)
    q, d = collection(make([3], 32, "f16", 35), row), collection(make([3], 64, "f16", 36), row)
    with pytest.raises(ShapeMismatch, match=r"32.*64"):
        cuda.score(q, d)
    with pytest.raises(UnsupportedDtype, match="float64"):
        cuda.pack(cupy.zeros((3, 4)))
    with pytest.raises(UnsupportedDtype, match=r"bf16"):
        cuda.pack(cupy.zeros((3, 4), np.uint16))
    with pytest.raises(DeviceMismatch, match="host"):
        cuda.pack(np.zeros((3, 4), np.float32))


# ------------------------------------------------------------------------------------- streams and selection


def test_a_call_can_be_captured_and_replayed() -> None:
    import cupy

    row = next(name for name, why in UNAVAILABLE.items() if why is None)
    for dtype in ("bf16", "f32"):
        q, d = collection(make([32], 128, dtype, 37), row), collection(make([300] * 50, 128, dtype, 38), row)
        out = cupy.zeros((1, 50), np.float64 if dtype == "f32" else np.float32)
        cuda.score(q, d, out=out)
        want = out.get()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            cuda.score(q, d, out=out)
            stream.synchronize()
            stream.begin_capture()
            cuda.score(q, d, out=out)
            graph = stream.end_capture()
            out.fill(0)
            graph.launch(stream)
            stream.synchronize()
        np.testing.assert_array_equal(out.get(), want)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_topk_and_streaming(dtype: str) -> None:
    row = next(name for name, why in UNAVAILABLE.items() if why is None)
    lengths = [int(n) for n in np.random.default_rng(39).integers(0, 40, 3000)]
    queries, documents = make([32] * 3, 64, dtype, 40), make(lengths, 64, dtype, 41)
    documents[70], documents[2000] = documents[5], documents[5]
    nan = next(i for i in range(100, 200) if lengths[i])
    documents[nan][0, 0] = np.nan
    q, d = collection(queries, row), collection(documents, row)
    scores = cuda.score(q, d).scores.get()
    order = np.lexsort(
        (np.broadcast_to(np.arange(3000), scores.shape), -np.nan_to_num(scores, nan=-np.inf), np.isnan(scores))
    )
    for k in (1, 10, 100, 2990, 3000):
        best, indices = cuda.topk(q, d, k)
        np.testing.assert_array_equal(indices.get(), order[:, :k])
        np.testing.assert_array_equal(best.get(), np.take_along_axis(scores, order[:, :k], 1))
    host = np.concatenate(documents)
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in documents])])
    for block in (None, 100, 777):
        best, indices = cuda.stream_topk(q, host, offsets, 50, block=block)
        np.testing.assert_array_equal(indices.get(), order[:, :50])
        np.testing.assert_array_equal(best.get(), np.take_along_axis(scores, order[:, :50], 1))
    candidates = np.array([[5, 2000, 70, -1, 8], [1, 2, 3, 4, 6], [nan, 5, -1, -1, 2000]])
    best, indices = cuda.topk(q, d, 4, candidates=candidates)
    for i in range(3):
        chosen = sorted(candidates[i][candidates[i] >= 0], key=lambda j: (np.isnan(scores[i, j]), -scores[i, j], j))
        assert list(indices.get()[i])[: len(chosen)] == chosen[:4]


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_angular_topk_is_lowest_first(dtype: str) -> None:
    row = next(name for name, why in UNAVAILABLE.items() if why is None)
    q, d = collection(make([9, 32], 64, dtype, 42), row), collection(make(RAGGED, 64, dtype, 43), row)
    scores = cuda.score(q, d, metric="angular").scores.get()
    best, indices = cuda.topk(q, d, 5, metric="angular")
    order = np.argsort(scores, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(indices.get(), order)
    np.testing.assert_array_equal(best.get(), np.take_along_axis(scores, order, 1))


# ------------------------------------------------------------------------------------- through the public names


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_public_functions_take_device_arrays(dtype: str) -> None:
    import numkong_py as nk

    queries, documents = make([32, 32], 96, dtype, 44), make(RAGGED, 96, dtype, 45)
    host = nk.pack(documents, backend="serial")
    name = "bf16" if dtype == "bf16" else None
    device = nk.pack(upload(np.concatenate(documents)), offsets=host.offsets, dtype=name)
    assert device.device.startswith("cuda") and device.backend in UNAVAILABLE
    for metric in ("dot", "cosine", "angular"):
        want = nk.maxsim(nk.pack(queries, backend="serial"), host, metric=metric, return_bounds=True)
        got = nk.maxsim(nk.pack(upload(np.stack(queries)), dtype=name), device, metric=metric, return_bounds=True)
        want_scores, got_scores = np.asarray(want.scores, np.float64), got.scores.get().astype(np.float64)
        finite = np.isfinite(want_scores)
        np.testing.assert_array_equal(finite, np.isfinite(got_scores))
        slack = np.asarray(want.bounds) + got.bounds.get()
        assert (np.abs(want_scores - got_scores)[finite] <= slack[finite]).all()
    part = device[3:7]
    assert (part.lengths == RAGGED[3:7]).all()
    query = nk.pack(upload(queries[0]), dtype=name)
    whole = nk.maxsim(query, device).get()
    np.testing.assert_array_equal(nk.maxsim(query, part).get(), whole[3:7])
    np.testing.assert_array_equal(nk.maxsim_candidates(query, part, [2, -1, 0]).get(), [whole[5], -np.inf, whole[3]])
    scores, indices = nk.topk(query, device, 4)
    assert (np.diff(scores.get()) <= 0).all() and indices.shape == (4,)
    assert nk.topk(query, device, 40)[1].shape == (40,)
    moved = host.to("cuda")
    np.testing.assert_array_equal(nk.maxsim(query, moved).get(), whole)
    token = np.asarray(device[3].unpack().get()).view(NUMPY[dtype])
    np.testing.assert_array_equal(token.view(np.uint8), documents[3].view(np.uint8))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_normalised_packing_has_the_bits_of_the_cpu_rows(dtype: str) -> None:
    import numkong_py as nk

    name = "bf16" if dtype == "bf16" else None
    for depth, kind in ((128, "gauss"), (100, "wide"), (7, "negative")):
        tokens = make([300], depth, dtype, 46, kind)[0]
        tokens[5] = 0
        want = nk.pack(tokens, normalize=True, backend="serial").unpack()
        got = nk.pack(upload(tokens), normalize=True, dtype=name).unpack().get()
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_repeated_calls_take_the_short_way_to_the_same_bits(dtype: str) -> None:
    """Loud and quiet tokens, packed and plain queries, cut and whole documents: first call and later ones agree."""
    import cupy

    row = next(name for name, why in UNAVAILABLE.items() if why is None)
    name = "bf16" if dtype == "bf16" else None
    for lengths, tokens in (([300] * 40, 32), ([1024] * 8, 1024), ([70] * 2000, 33)):
        for loud in (False, True) if dtype == "bf16" else (False,):
            query, documents = make([tokens] * 2, 128, dtype, 47), make(lengths, 128, dtype, 48)
            if loud:
                query[1][5] *= 2.0**100
                documents[3][7] *= 2.0**100
            d = collection(documents, row)
            plain = upload(np.stack(query))
            want = cuda.score(collection(query, row), d, return_argmax=True).scores.get()
            assert not np.isnan(want).any()
            for _ in range(3):
                np.testing.assert_array_equal(cuda.score(plain, d, dtype=name).scores.get(), want)
                np.testing.assert_array_equal(cuda.score(collection(query, row), d).scores.get(), want)
            out = cupy.full(want.shape, 7, np.float32)
            assert cuda.score(plain, d, dtype=name, out=out).scores is out
            np.testing.assert_array_equal(out.get(), want)


def test_a_collection_beyond_2_to_the_31_elements() -> None:
    import cupy

    row = next(name for name, why in UNAVAILABLE.items() if why is None)
    free, _ = cupy.cuda.runtime.memGetInfo()
    count, tokens, depth = 60_000, 300, 128  # 2.3e9 elements, 4.6 GB
    if free < 12e9:
        pytest.skip(f"needs 12 GB of device memory, {free / 1e9:.0f} GB are free")
    block = make([tokens] * 50, depth, "f16", 49)
    small = collection(block, row)
    corpus = cupy.empty((count // 50, 50 * tokens, depth), np.float16)
    corpus[:] = upload(np.concatenate(block))
    assert corpus.size > 2**31
    for queries in (make([32], depth, "f16", 50), make([32] * 40, depth, "f16", 51)):
        q = collection(queries, row)
        large = cuda.pack(corpus.reshape(count, tokens, depth), row=row, copy=False)
        large.prepare()
        scores = cuda.score(q, large).scores
        want = cuda.score(q, small).scores
        assert bool((scores.reshape(len(queries), count // 50, 50) == want[:, None, :]).all())
        best, indices = cuda.topk(q, large, 5)
        assert (indices.get()[0] == int(want[0].argmax()) + 50 * np.arange(5)).all()
        assert bool((best[0] == want[0].max()).all())
