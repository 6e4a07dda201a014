"""Relations that must hold whatever the input: found by hypothesis, on every available CPU row, to the bit."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from oracle import DTYPES, FINITE_KINDS, KINDS, METRICS, REDUCTIONS, assert_same_bits, assert_same_result, bits, tokens
from test_coded import CODED, assert_within_bounds, coding, limit_of, widened

import numkong_py as nk
from numkong_py import reference

AVAILABLE = [row.name for row in nk.backends() if row.device == "cpu" and row.available]
DTYPES_OF = {row.name: [dtype for dtype in row.dtypes if dtype in DTYPES] for row in nk.backends()}
EVERYTHING = {"return_argmax": True, "return_token_scores": True}
COUNTS = st.one_of(st.integers(0, 4), st.sampled_from([7, 8, 9, 15, 16, 17, 33, 49]))
EXAMPLES = settings(max_examples=60)

rows = pytest.mark.parametrize("row", AVAILABLE)


@st.composite
def problems(draw: Any, row: str, kinds: tuple[str, ...] = tuple(KINDS)) -> tuple[list, list, dict[str, str]]:
    """Queries, documents (one dtype that the row has, one kind each) and options."""
    dtype, depth, seed = draw(st.sampled_from(DTYPES_OF[row])), draw(st.integers(1, 70)), draw(st.integers(0, 2**32))
    sides = []
    for side, most in ((0, 3), (1, 6)):
        kind, counts = draw(st.sampled_from(kinds)), draw(st.lists(COUNTS, min_size=1, max_size=most))
        sides.append([tokens(kind, dtype, c, depth, seed + 2 * i + side, flip=side == 0) for i, c in enumerate(counts)])
    options = {"metric": draw(st.sampled_from(METRICS)), "reduction": draw(st.sampled_from(REDUCTIONS))}
    return *sides, options


def score(row: str, queries: Any, documents: Any, options: dict[str, str]) -> Any:
    """Pack both with the row and score with argmax and token scores."""
    packed = nk.pack(queries, backend=row), nk.pack(documents, backend=row)
    return nk.maxsim_packed(*packed, **options, **EVERYTHING)


@rows
@EXAMPLES
@given(data=st.data())
def test_any_ragged_collection_scores_like_the_reference(row: str, data: st.DataObject) -> None:
    queries, documents, options = data.draw(problems(row))
    assert_same_result(
        score(row, queries, documents, options), reference.maxsim(queries, documents, **options, **EVERYTHING)
    )


@rows
@pytest.mark.parametrize("precision", CODED)
@EXAMPLES
@given(data=st.data())
def test_codes_of_anything_score_like_the_reference_and_within_bounds(
    row: str, precision: str, data: st.DataObject
) -> None:
    queries, documents, options = data.draw(problems(row))
    codes = coding(precision, documents[0].shape[1])
    asked, coded = nk.pack(queries, backend=row), nk.pack(documents, backend=row, **codes)
    actual = nk.maxsim_packed(asked, coded, **options, **EVERYTHING, return_bounds=True)
    expected = reference.maxsim(queries, documents, query_limit=limit_of(row), **codes, **options, **EVERYTHING)
    assert_same_result(actual, expected)
    assert_within_bounds(actual, reference.maxsim(widened(queries), widened(documents), **options))


@rows
@EXAMPLES
@given(data=st.data())
def test_any_strides_score_like_the_contiguous_copy(row: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES_OF[row]))
    base = tokens("random", dtype, 24, 24, data.draw(st.integers(0, 99))).reshape(6, 8, 12)
    view = base.transpose(data.draw(st.permutations([0, 1, 2])))
    steps = st.sampled_from([-3, -2, -1, 1, 2, 3])
    view = view[tuple(slice(None, None, data.draw(steps)) for _ in range(3))]
    copy = np.ascontiguousarray(view)
    lengths = np.array(data.draw(st.lists(st.integers(0, view.shape[1]), min_size=len(view), max_size=len(view))))
    packed = nk.pack(view, lengths=lengths, backend=row)
    query = nk.pack(view[0], backend=row)
    expected = reference.maxsim(copy[0], reference.sets(copy, lengths=lengths), **EVERYTHING)
    assert_same_result(nk.maxsim_packed(query, packed, **EVERYTHING), expected)


@rows
@EXAMPLES
@given(data=st.data())
def test_joined_documents_have_the_best_of_their_parts(row: str, data: st.DataObject) -> None:
    queries, documents, options = data.draw(problems(row, FINITE_KINDS))
    parts = score(row, queries, documents, options)
    joined = score(row, queries, [np.concatenate(documents)], options)
    best = np.min if options["metric"] == "angular" else np.max
    assert_same_bits(joined.token_scores[:, 0], best(parts.token_scores, axis=1), "token_scores")


@rows
@EXAMPLES
@given(data=st.data())
def test_permuted_documents_permute_the_results(row: str, data: st.DataObject) -> None:
    queries, documents, options = data.draw(problems(row))
    order = data.draw(st.permutations(range(len(documents))))
    plain = score(row, queries, documents, options)
    permuted = score(row, queries, [documents[i] for i in order], options)
    assert_same_result(permuted, type(plain)(*(None if part is None else part[:, order] for part in plain)))


@rows
@EXAMPLES
@given(data=st.data())
def test_permuted_tokens_of_a_document_change_no_score(row: str, data: st.DataObject) -> None:
    queries, documents, options = data.draw(problems(row, FINITE_KINDS))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    plain = score(row, queries, documents, options)
    permuted = score(row, queries, [document[rng.permutation(len(document))] for document in documents], options)
    assert_same_bits(permuted.scores, plain.scores)
    assert_same_bits(permuted.token_scores, plain.token_scores, "token_scores")


@rows
@EXAMPLES
@given(data=st.data())
def test_scores_add_up_from_token_scores_and_query_parts(row: str, data: st.DataObject) -> None:
    queries, documents, options = data.draw(problems(row, FINITE_KINDS))
    whole = score(row, [np.concatenate(queries)], documents, {**options, "reduction": "sum"})
    parts = score(row, queries, documents, {**options, "reduction": "sum"})
    pieces = [parts.token_scores[i, :, : len(query)] for i, query in enumerate(queries)]
    assert_same_bits(whole.token_scores[0], np.concatenate(pieces, axis=1), "token_scores")
    if whole.scores.dtype == np.float64 and whole.token_scores.shape[2]:
        assert_same_bits(whole.scores[0], np.add.accumulate(whole.token_scores[0], axis=1)[:, -1])


@rows
@EXAMPLES
@given(data=st.data())
def test_repeated_tokens_change_nothing(row: str, data: st.DataObject) -> None:
    queries, documents, options = data.draw(problems(row))
    repeated = [np.concatenate([document, document[::-1], document]) for document in documents]
    assert_same_result(score(row, queries, repeated, options), score(row, queries, documents, options))


@rows
@EXAMPLES
@given(data=st.data())
def test_trailing_zero_dimensions_change_nothing(row: str, data: st.DataObject) -> None:
    queries, documents, options = data.draw(problems(row))
    extra = data.draw(st.integers(1, 40))
    wider = [[np.pad(part, ((0, 0), (0, extra))) for part in side] for side in (queries, documents)]
    finite = all(np.isfinite(part.astype(np.float64)).all() for part in queries + documents)
    if finite or options["metric"] != "dot":  # 0 * inf in the added dimensions never happens: they are 0 on both sides
        assert_same_result(score(row, *wider, options), score(row, queries, documents, options))


@rows
@EXAMPLES
@given(data=st.data())
def test_powers_of_two_scale_dots_and_leave_cosines(row: str, data: st.DataObject) -> None:
    queries, documents, options = data.draw(problems(row, ("random", "clustered", "zeros", "one_hot")))
    exponent = data.draw(st.integers(-2, 2))
    scaled = [(document.astype(np.float64) * 2.0**exponent).astype(document.dtype) for document in documents]
    back = [(document.astype(np.float64) / 2.0**exponent).astype(document.dtype) for document in scaled]
    hypothesis_holds = all(np.array_equal(bits(one), bits(two)) for one, two in zip(back, documents))
    if not hypothesis_holds:
        return  # an f16 subnormal lost a bit
    plain, other = score(row, queries, documents, options), score(row, queries, scaled, options)
    assert_same_bits(other.argmax, plain.argmax, "argmax")
    factor = 2.0**exponent if options["metric"] == "dot" else 1.0
    assert_same_bits(other.scores, plain.scores * plain.scores.dtype.type(factor))


@pytest.mark.skipif(len(AVAILABLE) < 2, reason="only one CPU row is available here")
@EXAMPLES
@given(data=st.data())
def test_all_rows_agree(data: st.DataObject) -> None:
    queries, documents, options = data.draw(problems(AVAILABLE[-1]))
    dtype = next(name for name in DTYPES if DTYPES[name] == documents[0].dtype)
    able = [row for row in AVAILABLE if dtype in DTYPES_OF[row]]
    results = [score(row, queries, documents, options) for row in able]
    for result in results[1:]:
        assert_same_result(result, results[0])


@rows
@EXAMPLES
@given(data=st.data())
def test_topk_is_a_stable_sort(row: str, data: st.DataObject) -> None:
    queries, documents, options = data.draw(problems(row))
    k = data.draw(st.integers(1, len(documents)))
    packed = nk.pack(queries, backend=row), nk.pack(documents, backend=row)
    scores, indices = nk.topk(*packed, k, **options)
    expected = reference.topk(queries, documents, k, **options)
    assert_same_bits(indices, expected[1], "indices")
    assert_same_bits(scores, expected[0])


@EXAMPLES
@given(data=st.data())
def test_masks_are_the_same_as_removing_tokens(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    count, longest = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 20))
    x = tokens("random", dtype, count * longest, 9, data.draw(st.integers(0, 99))).reshape(count, longest, 9)
    flat = data.draw(st.lists(st.booleans(), min_size=count * longest, max_size=count * longest))
    mask = np.array(flat).reshape(count, longest)
    query = tokens("random", dtype, 3, 9, 5)
    parts = [x[b][mask[b]] for b in range(count)]
    expected = reference.maxsim(query, parts, **EVERYTHING)
    spoiled = np.where(mask[..., None], x, x.dtype.type(data.draw(st.sampled_from([0, 1e4, np.inf, np.nan]))))
    for form in (mask, mask.astype(np.int64), mask.astype(np.uint8)):
        assert_same_result(nk.maxsim(query, nk.collection(spoiled, mask=form), **EVERYTHING), expected)
