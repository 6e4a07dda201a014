"""Corpora: what is appended, deleted, compacted, found and explained; ids, metadata, snapshots, one writer."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import DEPTH, QUERIES, assert_holds, assert_tidy, document, documents, topk
from oracle import DTYPES, ROOT, assert_same_bits, lay_out
from test_huge_files import sparse_file

import numkong_py as nk
from numkong_py.backends import BACKENDS
from numkong_py.corpus import Queries, merge, search, shard_topk
from numkong_py.corpus.columns import Ids, hashes_of, id_tensors
from numkong_py.corpus.manifest import ShardEntry, read_manifest, write_manifest
from numkong_py.corpus.shards import ShardFile
from numkong_py.corpus.writer import FAN, as_collection, join, slice_documents

RANDOM = np.random.default_rng(80)


@pytest.fixture
def corpus(tmp_path: Path) -> nk.Corpus:
    """Empty, in shards of few documents."""
    return nk.Corpus.create(tmp_path / "corpus", DEPTH, "f32", shard_bytes=6000)


@pytest.fixture(params=["int", "str"])
def filled(request: pytest.FixtureRequest, corpus: nk.Corpus) -> tuple[nk.Corpus, list[Any]]:
    """40 documents in several shards, 8 of them deleted, with ids that do not rise."""
    ids = [(37 * i) % 101 for i in range(40)]
    names = ids if request.param == "int" else [f"d{i}" for i in ids]
    for begin in range(0, 40, 8):
        corpus.append(documents(names[begin : begin + 8]), names[begin : begin + 8])
    corpus.delete(names[5:13])
    return corpus, names[:5] + names[13:]


# ------------------------------------------------------------------------------------------- in general


@pytest.mark.parametrize("kind", ["int", "str"])
def test_random_operations_against_a_list(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    path = tmp_path / "corpus"
    corpus, other = nk.Corpus.create(path, DEPTH, "f32", shard_bytes=4000), nk.Corpus.open(path)
    ids: list[Any] = []
    for step in range(60):
        choice, writer = rng.random(), (corpus, other)[int(rng.integers(2))]
        if choice < 0.6 or not ids:
            new = [int(i) for i in rng.choice(300, int(rng.integers(1, 6)), replace=False)]
            new = [f"é{i}" for i in new] if kind == "str" else new
            if set(new) & set(ids):
                with pytest.raises(nk.DuplicateId, match=r"belongs to a document"):
                    writer.append(documents(new), new)
                continue
            assert writer.append(documents(new), new).tolist() == new
            ids += new
        elif choice < 0.9:
            gone = [ids[i] for i in rng.choice(len(ids), min(len(ids), int(rng.integers(1, 4))), replace=False)]
            assert writer.delete(gone) == len(gone)
            ids = [id for id in ids if id not in gone]
        else:
            writer.compact()
        assert_holds(writer, ids)
        if step % 5 == 0:
            assert_holds(nk.Corpus.open(path, verify="full"), ids)
    assert_holds(corpus.refresh(), ids)
    corpus.compact()
    assert_holds(corpus, ids)
    assert_tidy(path)
    generation = corpus.info()["generation"]
    assert corpus.compact() == 0 and corpus.info()["generation"] == generation  # nothing left to do


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "row", [row for row in BACKENDS if row.device == "cpu" and row.available], ids=lambda r: r.name
)
def test_scores_are_those_of_one_packed_tensor(
    row: Any, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype not in row.dtypes:
        pytest.skip(f"{row.name} has no {dtype} kernel")
    monkeypatch.setenv("NUMKONG_CAPABILITIES", row.name)
    parts = [document(i).astype(DTYPES[dtype]) for i in range(30)] + [np.full((2, DEPTH), np.nan, DTYPES[dtype])]
    queries = [query.astype(DTYPES[dtype]) for query in QUERIES]
    corpus = nk.Corpus.create(tmp_path / "corpus", DEPTH, dtype, shard_bytes=3000)
    corpus.append(iter([parts[:7], parts[7:]]))
    assert {shard.row for shard in corpus.shards} == {row.name} and len(corpus.shards) > 1
    packed = nk.pack(parts, backend=row.name)
    for metric in ("dot", "cosine", "angular"):
        for reduction in ("sum", "mean"):
            for k in (1, 4, 40):
                options = {"metric": metric, "reduction": reduction, "empty": 0.25}
                scores, found = corpus.topk(queries, k, **options, block=3, threads=2)
                wanted, places = nk.topk(queries, packed, k, **options)
                assert_same_bits(scores, wanted)
                assert_same_bits(found, places)
        assert_same_bits(corpus.topk(queries[0], 3, metric=metric)[0], nk.topk(queries[0], packed, 3, metric=metric)[0])


def test_shards_answer_alone_and_merge_in_any_order(filled: tuple[nk.Corpus, list[Any]]) -> None:
    corpus, ids = filled
    queries = Queries(QUERIES, DEPTH, "f32")
    shards = [pickle.loads(pickle.dumps(shard)) for shard in corpus.shards]
    parts = [shard_topk(shard, queries, 4, metric="cosine") for shard in shards]
    scores, places = merge(parts[::-1], 4, descending=True)
    wanted, found = corpus.topk(QUERIES, 4, metric="cosine")
    assert_same_bits(scores, wanted)
    flat = np.concatenate([shard.ids for shard in shards])
    assert flat[places].tolist() == found.tolist()
    assert sum(len(shard) for shard in shards) == len(ids) and sum(shard.count for shard in shards) > len(ids)
    assert [shard.begin for shard in shards] == np.cumsum([0, *(shard.count for shard in shards[:-1])]).tolist()
    live = np.concatenate([np.delete(shard.ids, shard.tombstones) for shard in shards])
    assert live.tolist() == ids


def test_ties_go_to_what_was_appended_first(corpus: nk.Corpus) -> None:
    tokens = np.ones((60, DEPTH), np.float32)
    corpus.append([tokens] * 20, range(100, 80, -1))
    assert len(corpus.shards) > 2
    corpus.delete([100])
    assert corpus.topk(tokens[:2], 4)[1].tolist() == [99, 98, 97, 96]
    corpus.append([tokens], [100])
    assert corpus.topk(tokens[:2], 25)[1].tolist() == [*range(99, 79, -1)][:19] + [100] + [-1] * 5


def test_empty_documents_no_documents_and_no_queries(corpus: nk.Corpus) -> None:
    scores, ids = corpus.topk(QUERIES, 2)
    assert np.isneginf(scores).all() and (ids == -1).all() and scores.shape == (3, 2)
    assert corpus.topk(QUERIES, 1, metric="angular")[0].tolist() == [[np.inf]] * 3
    assert len(corpus) == 0 and corpus.ids.tolist() == [] and corpus.compact() == 0 and 3 not in corpus
    assert corpus.append([]).tolist() == [] and corpus.append(iter([])).tolist() == []
    nothing = np.zeros((0, DEPTH), np.float32)
    corpus.append([nothing, QUERIES[0], nothing])
    scores, ids = corpus.topk(QUERIES[0], 4)
    assert ids.tolist() == [1, 0, 2, -1] and np.isneginf(scores[1:]).all()
    assert corpus.topk([], 2)[0].shape == (0, 2)
    corpus.delete([1])
    assert corpus.topk(QUERIES[0], 2)[1].tolist() == [0, 2]
    corpus.delete([0, 2])
    assert len(corpus) == 0 and corpus.compact() > 0 and corpus.shards == ()
    assert corpus.append([nothing]).tolist() == [3]  # numbers are not given twice


@pytest.mark.parametrize("layout", ["list", "offsets", "lengths", "mask"])
def test_any_layout_is_split_into_shards(layout: str, corpus: nk.Corpus) -> None:
    parts = documents(range(60))
    given = lay_out(parts, layout)
    corpus.append(given.x, **given.keywords)
    corpus.append(nk.collection(given.x, **given.keywords))
    corpus.append(nk.pack(given.x, **given.keywords)[3:50])
    assert len(corpus.shards) > 3
    assert all(shard.file.entry.bytes < 6000 + 4096 for shard in corpus.shards)  # and what names it all
    wanted = parts + parts + parts[3:50]
    for id, tokens in enumerate(wanted):
        assert corpus[id].unpack().tobytes() == tokens.tobytes()


def test_slices_and_joins_of_collections() -> None:
    parts = [RANDOM.standard_normal((count, DEPTH)).astype(np.float32) for count in (3, 0, 5, 1, 0, 0, 7, 2)]
    for layout in ("list", "offsets", "lengths", "mask"):
        given = lay_out(parts, layout, seed=5)
        whole = as_collection(given.x, DEPTH, "f32", **given.keywords)
        for begin in range(9):
            for end in range(begin, 9):
                piece = join([slice_documents(whole, begin, end), slice_documents(whole, end, 8)])
                assert [x.tobytes() for x in nk.pack(piece).unpack()] == [x.tobytes() for x in parts[begin:]]


def test_one_document_and_one_large_one(corpus: nk.Corpus) -> None:
    corpus.append(QUERIES[0])
    large = RANDOM.standard_normal((2000, DEPTH)).astype(np.float32)
    corpus.append([QUERIES[2], large, QUERIES[2]])
    assert [corpus[i].tokens for i in range(4)] == [4, 9, 2000, 9]
    assert corpus[2].unpack().tobytes() == large.tobytes()
    assert corpus.topk(large[:3], 1)[1].tolist() == [2]


# ------------------------------------------------------------------------------------------- appending


def batches(count: int) -> Iterator[np.ndarray]:
    """One array, overwritten for every document."""
    room = np.empty((3, DEPTH), np.float32)
    for i in range(count):
        room[:] = i
        yield room


def test_a_stream_that_uses_its_memory_again(corpus: nk.Corpus) -> None:
    seen: list[int] = []
    ids = corpus.append(
        batches(300), (f"n{i}" for i in range(300)), ({"n": i} for i in range(300)), progress=seen.append
    )
    assert ids.tolist() == [f"n{i}" for i in range(300)] and sum(seen) == 300
    assert all((corpus[f"n{i}"].unpack() == i).all() for i in range(300))
    assert corpus.metadata["n"].tolist() == list(range(300))


def test_normalised_once(corpus: nk.Corpus) -> None:
    parts = [5 * tokens for tokens in documents(range(20))]
    corpus.append(iter(parts), normalize=True)
    corpus.append(parts, normalize=True)
    for id, tokens in enumerate(nk.pack(parts, normalize=True).unpack() * 2):
        assert corpus[id].unpack().tobytes() == tokens.tobytes()


def test_many_small_appends_leave_few_files(tmp_path: Path) -> None:
    corpus = nk.Corpus.create(tmp_path / "corpus", DEPTH, "f32")
    for id in range(100):
        corpus.append([document(id)])
        if id == 50:
            corpus.delete([20, 48, 50])
    ids = [id for id in range(100) if id not in (20, 48, 50)]
    assert len(corpus.shards) < 2 * FAN
    assert_holds(nk.Corpus.open(tmp_path / "corpus", verify="full"), ids)
    assert_tidy(tmp_path / "corpus")
    assert corpus.info()["deleted"] <= 3


def test_the_memory_of_an_append_does_not_grow_with_it(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("memory is measured in /proc")
    code = (
        "import resource, sys, numpy as np, numkong_py as nk\n"
        "corpus = nk.Corpus.create(sys.argv[1], 128, 'f32', shard_bytes=4 << 20)\n"
        "x = np.ones((2000, 128), np.float32)\n"
        "corpus.append([x] * 8)\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "corpus.append((x for _ in range(100)))\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024, corpus.info()['bytes'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "corpus")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    grown, size = map(int, done.stdout.split())
    assert size > 120e6 and grown < 20e6


def refused(corpus: nk.Corpus, error: type[Exception], message: str, *arguments: Any, **keywords: Any) -> None:
    """An append that must fail and leave everything as it was."""
    before, ids, names = read_manifest(corpus.path), corpus.ids.tolist(), sorted(os.listdir(corpus.path))
    with pytest.raises(error, match=message):
        corpus.append(*arguments, **keywords)
    assert read_manifest(corpus.path) == before
    assert set(os.listdir(corpus.path)) <= {*names, "writer.lock"}
    assert_holds(corpus, ids)


def test_wrong_appends(corpus: nk.Corpus) -> None:
    corpus.append(documents([7, 8]), [7, 8], {"year": [1, None]})
    two = documents([1, 2])
    wide = [np.zeros((2, DEPTH + 1), np.float32)]
    refused(corpus, nk.DuplicateId, "8 belongs to a document", two, [1, 8])
    refused(corpus, nk.DuplicateId, "1 is given twice", two, [1, 1])
    refused(corpus, nk.DuplicateId, "5 is given twice", iter([two, two]), [5, 6, 4, 5])
    refused(corpus, nk.ShapeMismatch, "ids: 1 for 2 documents", two, [1])
    refused(corpus, nk.ShapeMismatch, "ids: more than 2", two, [1, 2, 3])
    refused(corpus, nk.ShapeMismatch, "ids: 3 for 4 documents", iter([two, two]), iter([1, 2, 3]))
    refused(corpus, nk.ShapeMismatch, "ids: more than 4", iter([two, two]), iter(range(1, 6)))
    refused(corpus, nk.UnsupportedDtype, "'str', and this corpus has 'int'", two, ["a", "b"])
    refused(corpus, nk.UnsupportedDtype, "str and int together", two, ["a", 1])
    refused(corpus, nk.UnsupportedDtype, "int .64 bits", two, [1.0, 2.0])
    refused(corpus, nk.UnsupportedDtype, "int .64 bits", two, [1, 1 << 64])
    refused(corpus, nk.UnsupportedDtype, "beyond 2.63", two, np.array([1, 1 << 63], np.uint64))
    refused(corpus, nk.InvalidArgument, "-1 means no document", two, [-1, 1])
    refused(corpus, nk.ShapeMismatch, "depth 9, and the corpus has 8", wide)
    refused(corpus, nk.ShapeMismatch, "depth 9, and the corpus has 8", iter([two, wide]))
    refused(corpus, nk.UnsupportedDtype, "float16", [two[0].astype(np.float16)])
    refused(corpus, nk.UnsupportedDtype, "f16, and the corpus has f32", nk.pack(two[1].astype(np.float16)))
    refused(corpus, nk.InvalidArgument, "x is an iterator", iter([two]), offsets=[0, 1])
    refused(corpus, nk.UnsupportedDtype, "'str', and the column is of kind 'int'", two, None, {"year": ["a", "b"]})
    refused(corpus, nk.UnsupportedDtype, "float and str|'float'", two, None, {"year": [1.5, 2]})
    refused(corpus, nk.UnsupportedDtype, "a list, wanted int", two, None, {"tags": [[1], [2]]})
    refused(corpus, nk.UnsupportedDtype, "bool and int", two, None, {"flag": [True, 2]})
    refused(corpus, nk.UnsupportedDtype, "64 bits", two, None, {"year": [1 << 70, 2]})
    refused(corpus, nk.ShapeMismatch, r"metadata\['year'\]: 1 for 2", two, None, {"year": [1]})
    refused(corpus, nk.ShapeMismatch, "metadata: 1 for 2", two, None, [{"year": 1}])
    refused(corpus, nk.UnsupportedDtype, "one mapping for every document", two, None, [1, 2])
    for name in ("title-offsets", "", 3):
        refused(corpus, nk.InvalidArgument, f"column {name!r}, wanted a name", two, None, {name: [1, 2]})
    refused(corpus, nk.InvalidArgument, "no Unicode", two, None, {"title": ["\ud800", "b"]})

    def breaks() -> Iterator[Any]:
        yield from [documents(range(20, 60))] * 1
        raise RuntimeError("the source broke")

    refused(corpus, RuntimeError, "the source broke", breaks())
    assert corpus.append(documents([9])).tolist() == [9]


def test_ids_of_deleted_documents_are_free_again(corpus: nk.Corpus) -> None:
    corpus.append(documents("abc"), list("abc"))
    corpus.delete("b")
    corpus.append(documents("xb"), ["x", "b"])
    assert_holds(corpus, ["a", "c", "x", "b"])
    with pytest.raises(nk.InvalidArgument, match="has 'str' ids; pass one"):
        corpus.append(documents("z"))
    corpus.compact()
    assert_holds(corpus, ["a", "c", "x", "b"])


def test_extreme_ids(corpus: nk.Corpus) -> None:
    ids = [-(1 << 63), (1 << 63) - 1, -2, 0]
    corpus.append(documents(ids), np.array(ids))
    assert_holds(nk.Corpus.open(corpus.path), ids)
    refused(corpus, nk.InvalidArgument, "largest id is 9223372036854775807; pass ids", documents([1]))
    assert len(corpus.append(iter([[], []]))) == 0  # nothing needs an id


def test_hashes_that_collide_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from numkong_py.corpus import columns

    monkeypatch.setattr(columns, "hashes_of", lambda ids: np.full(len(ids), 7, np.uint64))
    ids = np.array(["b", "", "a", "ä"], object)
    found = Ids(id_tensors(ids), 4)
    wanted = np.array(["ä", "a", "c", "", "b"], object)
    assert found.find(wanted, columns.hashes_of(wanted)).tolist() == [3, 2, -1, 1, 0]
    assert hashes_of(np.array([3])).tolist() == [3]


# ------------------------------------------------------------------------------------------- metadata


def test_metadata(corpus: nk.Corpus) -> None:
    corpus.append(documents(range(3)), metadata={"title": ["one", "", "drei 3️⃣"], "year": np.array([1, 2, 3])})
    corpus.append(documents(range(3, 5)), metadata=[{"score": 1, "year": 4}, {"title": None, "score": 2.5, "ok": True}])
    corpus.append(documents(range(5, 7)))
    corpus.delete([1])
    for _ in range(2):
        metadata = corpus.metadata
        assert dict(corpus.info()["columns"]) == {"title": "str", "year": "int", "score": "float", "ok": "bool"}
        assert list(metadata) == ["title", "year", "score", "ok"] and len(metadata) == 4
        assert metadata["title"].tolist() == ["one", "drei 3️⃣", None, None, None, None]
        assert metadata["year"].tolist() == [1, 3, 4, None, None, None]
        assert metadata["score"].tolist() == [None, None, 1.0, 2.5, None, None]
        assert metadata.rows([4, 0])[0] == {"title": None, "year": None, "score": 2.5, "ok": True}
        assert metadata.rows([4, 0])[1] == {"title": "one", "year": 1, "score": None, "ok": None}
        with pytest.raises(KeyError):
            metadata["missing"]
        with pytest.raises(nk.UnknownId):
            metadata.rows([1])
        corpus.compact()


def test_declared_columns(tmp_path: Path) -> None:
    corpus = nk.Corpus.create(tmp_path / "corpus", DEPTH, "f32", columns={"weight": "float", "tag": "str"})
    assert corpus.metadata["tag"].tolist() == []
    corpus.append(documents([1, 2]), metadata={"weight": [1, 2], "tag": [None, None]})
    assert corpus.metadata["weight"].dtype == np.float64 and corpus.metadata["tag"].tolist() == [None, None]
    with pytest.raises(nk.InvalidArgument, match="'text', wanted one of 'int'"):
        nk.Corpus.create(tmp_path / "other", DEPTH, "f32", columns={"tag": "text"})
    assert nk.Corpus.create(tmp_path / "none", DEPTH, "f32").metadata.rows([]) == []


# ------------------------------------------------------------------------------------------- deleting


def test_deleting(filled: tuple[nk.Corpus, list[Any]]) -> None:
    corpus, ids = filled
    other = "nobody" if isinstance(ids[0], str) else 4040
    with pytest.raises(nk.UnknownId, match=r"no document .* and 1 others in the corpus; pass missing"):
        corpus.delete([ids[0], other, other])
    assert_holds(corpus, ids)
    assert corpus.delete([ids[0], other, ids[0]], missing="ignore") == 1
    with pytest.raises(nk.UnknownId):
        corpus.delete([ids[0]])
    assert corpus.delete([]) == 0
    assert_holds(corpus, ids[1:])
    assert ids[0] not in corpus and ids[1] in corpus and None not in corpus
    with pytest.raises(nk.InvalidArgument, match="'no', wanted one of 'raise', 'ignore'"):
        corpus.delete([], missing="no")
    saved = corpus.compact()
    assert saved > 0 and corpus.info()["deleted"] == 0
    assert_holds(corpus, ids[1:])


# ------------------------------------------------------------------------------------------- searching by id


@pytest.mark.parametrize("few", [True, False])
def test_include_and_exclude(filled: tuple[nk.Corpus, list[Any]], few: bool) -> None:
    corpus, ids = filled
    chosen = ids[::4] if few else ids[3:]
    for k in (1, 5, 50):
        for metric in ("dot", "angular"):
            for kept, options in [
                (chosen, {"include": chosen}),
                ([id for id in ids if id not in chosen], {"exclude": chosen}),
                (
                    chosen[1:],
                    {"include": chosen, "exclude": chosen[:1] + [ids[-1]]} if few else {"include": chosen[1:]},
                ),
            ]:
                kept = [id for id in ids if id in kept and id not in options.get("exclude", [])]
                scores, found = corpus.topk(QUERIES, k, metric=metric, **options)
                wanted, names = topk(kept, k, metric=metric)
                assert_same_bits(scores, wanted)
                assert found.tolist() == names.tolist()
    assert corpus.topk(QUERIES, 2, include=[])[1].tolist() == corpus.topk(QUERIES, 2, exclude=ids)[1].tolist()
    other = "nobody" if isinstance(ids[0], str) else 4040
    with pytest.raises(nk.UnknownId, match="include"):
        corpus.topk(QUERIES, 2, include=[other])
    assert corpus.topk(QUERIES[0], 2, include=[other, ids[2]], missing="ignore")[1].tolist()[0] == ids[2]
    corpus.topk(QUERIES, 2, exclude=[other])


def test_candidates(filled: tuple[nk.Corpus, list[Any]]) -> None:
    corpus, ids = filled
    none = None if isinstance(ids[0], str) else -1
    lists = [ids[3:20], [ids[1], none, ids[1], ids[30]], []]
    for k in (1, 3, 30):
        scores, found = corpus.topk(QUERIES, k, candidates=lists)
        for row, candidates in enumerate(lists):
            kept = [id for id in ids if id in candidates]
            if not kept:
                assert found[row].tolist() == [none] * k
                continue
            wanted, names = topk(kept, k, QUERIES[row])
            assert_same_bits(scores[row], wanted)
            assert found[row].tolist() == names.tolist()
    one = corpus.topk(QUERIES[0], 2, candidates=ids[3:20])
    assert one[1].tolist() == corpus.topk(QUERIES, 2, candidates=np.array([ids[3:20]] * 3))[1][0].tolist()
    both = corpus.topk(QUERIES, 3, candidates=[ids] * 3, include=ids[:9], exclude=ids[:2])
    assert both[1].tolist() == corpus.topk(QUERIES, 3, include=ids[2:9])[1].tolist()
    with pytest.raises(nk.ShapeMismatch, match="2 lists of ids, wanted 3"):
        corpus.topk(QUERIES, 2, candidates=[ids, ids])
    with pytest.raises(nk.ShapeMismatch, match="wanted 3"):
        corpus.topk(QUERIES, 2, candidates=ids[:3])
    other = "nobody" if isinstance(ids[0], str) else 4040
    with pytest.raises(nk.UnknownId, match="candidates"):
        corpus.topk(QUERIES[0], 2, candidates=[other])
    assert corpus.topk(QUERIES[0], 1, candidates=[other, ids[0]], missing="ignore")[1].tolist() == [ids[0]]


def test_candidates_that_are_empty_documents_are_found(corpus: nk.Corpus) -> None:
    nothing = np.zeros((0, DEPTH), np.float32)
    corpus.append([nothing, QUERIES[0], nothing])
    scores, found = corpus.topk([QUERIES[0]] * 2, 1, candidates=[[-1, -1, 2], [0, 1, 2]])
    assert found.tolist() == [[2], [1]] and np.isneginf(scores[0, 0])


def test_thresholds(filled: tuple[nk.Corpus, list[Any]]) -> None:
    corpus, ids = filled
    none = None if isinstance(ids[0], str) else -1
    for metric, keeps in (("dot", np.greater_equal), ("cosine", np.greater_equal), ("angular", np.less_equal)):
        means, names = topk(ids, 20, metric=metric, reduction="mean")
        least = float(means[0, 7])
        for reduction in ("sum", "mean"):
            scores, found = corpus.topk(QUERIES, 20, metric=metric, reduction=reduction, min_mean_score=least)
            kept = keeps(means, least)
            assert kept[0].sum() == 8
            assert found.tolist() == np.where(kept, names, none).tolist()
            assert (np.isinf(scores) >= ~kept).all()


def test_alignment_and_explanation(filled: tuple[nk.Corpus, list[Any]]) -> None:
    corpus, ids = filled
    for metric in ("dot", "cosine", "angular"):
        for id in ids[::5]:
            wanted = nk.maxsim(QUERIES[2], [document(id)], metric=metric, return_argmax=True, return_token_scores=True)
            aligned = corpus.alignment(QUERIES[2], id, metric=metric)
            assert_same_bits(aligned.argmax, wanted.argmax[0], "argmax")
            assert_same_bits(aligned.token_scores, wanted.token_scores[0], "token scores")
            explained = corpus.explain(QUERIES[2], id, metric=metric)
            assert explained.score == wanted.scores[0] and explained.document_tokens == len(document(id))
            assert explained.mean_score == wanted.scores[0] / 9
            assert repr(id) in str(explained) and str(explained).count("query token ") == 9
    packed = nk.pack(QUERIES[2], backend="serial")
    assert corpus.explain(packed, ids[0]).score == corpus.explain(QUERIES[2], ids[0]).score
    assert corpus.explain(QUERIES[1], ids[0]).score == 0
    with pytest.raises(nk.UnknownId):
        corpus.explain(QUERIES[0], "nobody" if isinstance(ids[0], str) else 4040)
    with pytest.raises(nk.ShapeMismatch, match="3 queries, wanted one"):
        corpus.alignment(QUERIES, ids[0])


def test_wrong_searches(filled: tuple[nk.Corpus, list[Any]]) -> None:
    corpus, _ = filled
    for k in (0, True, 1.5):
        with pytest.raises(nk.InvalidArgument, match="k: "):
            corpus.topk(QUERIES, k)
    with pytest.raises(nk.InvalidArgument, match="'l2', wanted one of"):
        corpus.topk(QUERIES, 1, metric="l2")
    with pytest.raises(nk.InvalidArgument, match="'max', wanted one of"):
        corpus.topk(QUERIES, 1, reduction="max")
    with pytest.raises(nk.InvalidArgument, match="'some', wanted one of"):
        corpus.topk(QUERIES, 1, screen="some")
    with pytest.raises(nk.InvalidArgument, match="block"):
        corpus.topk(QUERIES, 1, block=0)
    with pytest.raises(nk.UnsupportedDtype, match="queries"):
        corpus.topk([query.astype(np.float16) for query in QUERIES], 1)
    with pytest.raises(nk.ShapeMismatch, match="depth"):
        corpus.topk(np.zeros((2, DEPTH + 1), np.float32), 1)
    with pytest.raises(nk.UnsupportedDtype, match="queries: f16, and the corpus has f32"):
        corpus.topk(nk.pack(QUERIES[0].astype(np.float16)), 1)
    with pytest.raises(nk.InvalidArgument, match="'all', wanted one of"):
        corpus.topk(QUERIES, 1, missing="all")
    with pytest.raises(nk.UnknownId, match=r"no document .* in the corpus$"):
        corpus.metadata.rows([1000] if corpus.ids.dtype == np.int64 else ["none"])


@pytest.mark.parametrize(
    "wrong",
    [{"screen": "some"}, {"threads": 0}, {"min_mean_score": "high"}, {"min_mean_score": float("nan")}, {"block": 0}],
    ids=str,
)
def test_wrong_options_of_an_empty_corpus(wrong: dict[str, Any], corpus: nk.Corpus) -> None:
    with pytest.raises(nk.InvalidArgument, match=f"{next(iter(wrong))}: "):
        corpus.topk(QUERIES, 1, **wrong)


def test_a_corpus_whose_folder_moved(corpus: nk.Corpus) -> None:
    corpus.append(documents(range(3)))
    elsewhere = corpus.path.rename(corpus.path.with_name("elsewhere"))
    assert_holds(corpus, [0, 1, 2])
    with pytest.raises(FileNotFoundError, match="no corpus is here any more"):
        corpus.append(documents([3]))
    assert not corpus.path.exists()
    assert_holds(nk.Corpus.open(elsewhere), [0, 1, 2])


# ------------------------------------------------------------------------------------------- readers and writers


def test_readers_keep_their_snapshot(filled: tuple[nk.Corpus, list[Any]]) -> None:
    corpus, ids = filled
    cold, warm = nk.Corpus.open(corpus.path), nk.Corpus.open(corpus.path)
    assert_holds(warm, ids)
    corpus.delete(ids[:10])
    middle = nk.Corpus.open(corpus.path)
    corpus.compact()
    corpus.append(
        documents(["new"]) if isinstance(ids[0], str) else documents([999]),
        ["new"] if isinstance(ids[0], str) else [999],
    )
    assert {shard.path.name for shard in cold.shards} - set(os.listdir(corpus.path))
    for reader, wanted in ((cold, ids), (warm, ids), (middle, ids[10:])):
        assert_holds(reader, wanted)
    assert_holds(cold.refresh(), corpus.ids.tolist())
    assert cold.refresh().shards is cold.shards


def test_a_reader_that_meets_a_compaction_halfway(filled: tuple[nk.Corpus, list[Any]], monkeypatch: Any) -> None:
    from numkong_py.corpus import corpus as module

    corpus, ids = filled
    read, done = module.read_manifest, []

    def read_and_compact(folder: Path) -> Any:
        manifest = read(folder)
        if not done:
            done.append(True)
            corpus.compact()
        return manifest

    monkeypatch.setattr(module, "read_manifest", read_and_compact)
    assert_holds(nk.Corpus.open(corpus.path), ids)


def test_replaced_files_stay_while_their_grace_lasts(tmp_path: Path) -> None:
    corpus = nk.Corpus.create(tmp_path / "corpus", DEPTH, "f32", grace=3600)
    corpus.append(documents(range(9)))
    corpus.delete([3])
    shards = pickle.loads(pickle.dumps(corpus.shards))
    corpus.compact()
    assert_holds(corpus, [0, 1, 2, 4, 5, 6, 7, 8])
    hits = shard_topk(shards[0], Queries(QUERIES, DEPTH, "f32"), 3)
    assert hits[1].tolist() == corpus.topk(QUERIES, 3)[1].tolist()
    for name in os.listdir(corpus.path):
        os.utime(corpus.path / name, (1, 1))
    corpus.append(documents([9]))
    assert_tidy(corpus.path)


def test_one_writer(corpus: nk.Corpus) -> None:
    corpus.append(documents(range(3)))
    held, go = threading.Event(), threading.Event()

    def slow() -> Iterator[np.ndarray]:
        held.set()
        assert go.wait(60)
        yield document(3)

    writer = threading.Thread(target=nk.Corpus.open(corpus.path).append, args=(slow(),))
    writer.start()
    try:
        assert held.wait(60)
        for write in (lambda: corpus.append(documents([9])), lambda: corpus.delete([0]), corpus.compact):
            with pytest.raises(nk.CorpusLocked, match=f"process {os.getpid()} on .* is writing to it"):
                write()
        assert_holds(nk.Corpus.open(corpus.path), [0, 1, 2])
        waiting = nk.Corpus.open(corpus.path, wait=60)
        threading.Timer(0.05, go.set).start()
        waiting.delete([0])
    finally:
        go.set()
        writer.join()
    assert_holds(waiting, [1, 2, 3])


def test_the_lock_of_a_killed_writer_does_not_block(corpus: nk.Corpus) -> None:
    code = (
        "import os, signal, sys, numpy as np, numkong_py as nk\n"
        "def source():\n"
        "    yield np.ones((2, 8), np.float32)\n"
        "    os.kill(os.getpid(), 9)\n"
        "nk.Corpus.open(sys.argv[1]).append(source())\n"
    )
    if os.name != "posix":
        pytest.skip("kill -9 is POSIX")
    done = subprocess.run([sys.executable, "-c", code, str(corpus.path)], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == -9
    assert json.loads((corpus.path / "writer.json").read_text())["pid"] != os.getpid()
    corpus.append(documents([0]))
    assert_holds(corpus, [0])
    assert_tidy(corpus.path)


def test_creating_and_opening(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    corpus = nk.Corpus.create(path, DEPTH, np.float16)
    assert (corpus.depth, corpus.dtype, len(corpus)) == (DEPTH, "f16", 0) and "0 documents" in repr(corpus)
    with pytest.raises(nk.InvalidArgument, match=r"has a corpus already; nk.Corpus.open"):
        nk.Corpus.create(path, DEPTH, "f16")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    with pytest.raises(nk.InvalidArgument, match=r"'thesis.txt' in it"):
        nk.Corpus.create(tmp_path / "full", DEPTH, "f32")
    with pytest.raises(FileNotFoundError, match=r"no corpus is here; nk.Corpus.create"):
        nk.Corpus.open(tmp_path / "full")
    with pytest.raises(OSError):
        nk.Corpus.create(tmp_path / "full" / "thesis.txt", DEPTH, "f32")
    for wrong in (
        *({"depth": 0}, {"depth": 2.5}, {"shard_bytes": 0}, {"shard_bytes": 1 << 70}),
        *({"grace": -1}, {"grace": float("nan")}, {"grace": float("inf")}, {"grace": "1"}, {"wait": -1}, {"wait": "1"}),
        *({"columns": {"": "int"}}, {"columns": {3: "int"}}, {"columns": {"x-offsets": "int"}}),
    ):
        with pytest.raises(nk.InvalidArgument, match=next(iter(wrong))):
            nk.Corpus.create(tmp_path / "new", **{"depth": 4, "dtype": "f32", **wrong})
    with pytest.raises(nk.UnsupportedDtype):
        nk.Corpus.create(tmp_path / "new", 4, "int8")
    with pytest.raises(nk.InvalidArgument, match="'none', wanted one of"):
        nk.Corpus.open(path, verify="none")
    assert not (tmp_path / "new").exists()


def test_other_files_in_the_folder_are_left_alone(corpus: nk.Corpus) -> None:
    for name in ("shard-mine.safetensors", "notes.txt", "deleted-files.i64"):
        (corpus.path / name).write_text("mine")
    corpus.append(documents(range(3)))
    corpus.delete([0])
    corpus.compact()
    assert {"shard-mine.safetensors", "notes.txt", "deleted-files.i64"} <= set(os.listdir(corpus.path))


def test_info_reads_the_manifest_only(filled: tuple[nk.Corpus, list[Any]]) -> None:
    corpus, ids = filled
    info = nk.Corpus.open(corpus.path).info()
    assert (info["documents"], info["deleted"], info["depth"]) == (len(ids), corpus.info()["deleted"], DEPTH)
    assert info["bytes"] == sum(os.path.getsize(shard.path) for shard in corpus.shards)
    assert json.loads(json.dumps(info)) == info


def test_shards_are_files_that_open_alone(filled: tuple[nk.Corpus, list[Any]]) -> None:
    corpus, _ = filled
    shard = corpus.shards[0]
    opened = nk.open(shard.path, verify="full")
    assert [x.tobytes() for x in opened.unpack()] == [document(id).tobytes() for id in shard.ids]
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    tensors = numpy.load_file(shard.path)
    assert len(tensors["offsets"]) == shard.count + 1
    if shard.ids.dtype != object:
        assert tensors["ids"].tolist() == shard.ids.tolist()


def test_a_corpus_of_a_row_that_is_gone(filled: tuple[nk.Corpus, list[Any]], monkeypatch: Any) -> None:
    corpus, ids = filled
    rows = {shard.row for shard in corpus.shards}
    if rows == {"serial"}:
        pytest.skip("this machine has one row only")
    monkeypatch.setenv("NUMKONG_CAPABILITIES", "serial")
    with pytest.warns(nk.RepackWarning, match=r"cannot run here .*compact\(\) rewrites") as caught:
        corpus = nk.Corpus.open(corpus.path)
    assert caught[0].filename == __file__ and len(caught) == 1
    assert_holds(corpus, ids)
    corpus.compact()
    assert {shard.row for shard in corpus.shards} == {"serial"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_holds(nk.Corpus.open(corpus.path), ids)


# ------------------------------------------------------------------------------------------- from the disk


def read_everything(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Take every shard for one that has to come from the disk; the list tells which ones were read."""
    seen: list[Path] = []
    start_reading = ShardFile.start_reading
    monkeypatch.setattr(ShardFile, "is_cold", lambda file: True)
    monkeypatch.setattr(
        ShardFile, "start_reading", lambda file, *a, **k: seen.append(file.path) or start_reading(file, *a, **k)
    )
    return seen


@pytest.mark.parametrize("limit", [0, 1 << 40], ids=["past the cache", "through the cache"])
def test_shards_that_are_read_ahead(
    limit: int, filled: tuple[nk.Corpus, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, ids = filled
    monkeypatch.setattr(search, "cache_limit", lambda: limit)
    wanted = corpus.topk(QUERIES, 50, metric="cosine")
    reader = nk.Corpus.open(corpus.path)
    seen = read_everything(monkeypatch)
    scores, found = reader.topk(QUERIES, 50, metric="cosine", block=2)
    assert_same_bits(scores, wanted[0])
    assert found.tolist() == wanted[1].tolist()
    whole = [shard.path for shard in corpus.shards if 2 * len(shard.tombstones) <= shard.count]
    assert seen == whole and len(whole) > 2
    reader.topk(QUERIES, 5, candidates=[ids[:9]] * 3)
    assert seen == whole  # where few documents are looked at, their pages are enough
    corpus.compact()
    assert_holds(reader, ids)  # what lost its name is mapped


def test_threads_read_apart_while_the_corpus_changes(
    filled: tuple[nk.Corpus, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, ids = filled
    reader = nk.Corpus.open(corpus.path)
    wanted = reader.topk(QUERIES, 20)
    read_everything(monkeypatch)
    monkeypatch.setattr(search, "cache_limit", lambda: 0)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(reader.topk, QUERIES, 20) for _ in range(40)]
        while not all(each.done() for each in running):
            corpus.delete([ids.pop()])
            corpus.compact()
            if len(ids) < 3:
                break
        for each in running:
            scores, found = each.result()
            assert_same_bits(scores, wanted[0])
            assert found.tolist() == wanted[1].tolist()
    assert_holds(corpus, ids)


@pytest.mark.skipif(os.name != "posix", reason="this system has no limit of open files to lower")
def test_more_shards_than_open_files(tmp_path: Path) -> None:
    import resource

    corpus = nk.Corpus.create(tmp_path / "corpus", DEPTH, "f32", shard_bytes=1)
    corpus.append(documents(range(40)))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, before[1]))
    try:
        with pytest.raises(OSError, match=r"one file for each shard.*ulimit -n.*shard_bytes") as caught:
            nk.Corpus.open(corpus.path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert caught.value.errno == errno.EMFILE
    assert_holds(nk.Corpus.open(corpus.path), list(range(40)))


def test_a_shard_that_shrinks_or_changes_while_it_is_read(
    filled: tuple[nk.Corpus, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, _ = filled
    read_everything(monkeypatch)
    shard = corpus.shards[0]
    shard.file.stored()
    data = shard.path.read_bytes()
    copy = shard.path.with_suffix(".copy")
    start = shard.file.stored().start
    shorter, other = data[: len(data) // 2], data[:start] + b"\xff" * (len(data) - start)
    for change, message in ((shorter, "shorter"), (other, "")):
        copy.write_bytes(change)
        os.replace(copy, shard.path)
        with pytest.raises(nk.CorruptFile, match=f"{shard.path.name}.*{message}"):
            corpus.topk(QUERIES, 3)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this system does not tell what is in memory")
def test_what_is_in_memory_is_not_read(tmp_path: Path) -> None:
    corpus = nk.Corpus.create(tmp_path / "corpus", 64, "f32")
    corpus.append(RANDOM.standard_normal((20000, 64)).astype(np.float32))
    file = corpus.shards[0].file
    assert not file.is_cold()  # just written
    handle = os.open(file.path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        os.preadv(handle, [bytearray(1)], file.entry.bytes // 2, os.RWF_NOWAIT)
        pytest.skip("this file system keeps its pages, or has no reads that do not wait")
    except BlockingIOError:
        assert file.is_cold()
    except OSError as error:
        pytest.skip(f"this file system has no reads that do not wait: {error}")
    finally:
        os.close(handle)


def test_documents_are_moved_to_queries_on_a_device(
    filled: tuple[nk.Corpus, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device: what would be moved stays where it is, and is counted."""
    corpus, ids = filled
    moved: list[int] = []

    def move(packed: nk.PackedTensor, device: str) -> nk.PackedTensor:
        assert device == "cuda:0"
        moved.append(len(packed))
        return packed

    wanted = {"all": corpus.topk(QUERIES, 6), "listed": corpus.topk(QUERIES, 6, candidates=[ids[:7], ids[3:5], []])}
    monkeypatch.setattr(nk.PackedTensor, "to", move)
    monkeypatch.setattr("numkong_py.corpus.corpus.Queries", OnDevice)
    found = corpus.topk(QUERIES, 6, block=3)
    assert_same_bits(found[0], wanted["all"][0])
    assert found[1].tolist() == wanted["all"][1].tolist()
    few = [2 * len(shard.tombstones) > shard.count for shard in corpus.shards]
    assert max(moved) <= 3
    assert sum(moved) == sum(len(shard) if listed else shard.count for shard, listed in zip(corpus.shards, few))
    moved.clear()
    found = corpus.topk(QUERIES, 6, candidates=[ids[:7], ids[3:5], []])
    assert_same_bits(found[0], wanted["listed"][0])
    assert found[1].tolist() == wanted["listed"][1].tolist()
    assert sum(moved) == 7  # every candidate once, and nothing else


class OnDevice(Queries):
    """Queries that say that they are on a device."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.device = "cuda:0"


# ------------------------------------------------------------------------------------------- size


@pytest.mark.skipif(sys.platform != "linux", reason="sparse files and memory as Linux has them")
def test_opening_20_gb_takes_no_time_and_no_memory(tmp_path: Path) -> None:
    corpus = nk.Corpus.create(tmp_path / "corpus", 128, "f16")
    tokens = RANDOM.standard_normal((250, 128)).astype(np.float16)
    last = nk.pack([tokens], backend="serial")
    offsets = np.arange(4001, dtype=np.int64) * 250
    entries = []
    for number in range(80):
        name = f"shard-{number:016x}.safetensors"
        ids = np.arange(4000) + 4000 * number
        head = sparse_file(corpus.path / name, offsets, 128, last, {"ids": ids})
        size = os.path.getsize(corpus.path / name)
        entries.append(ShardEntry(name, head, size, 4000, 1_000_000, "serial", int(ids[0]), int(ids[-1])))
    write_manifest(corpus.path, read_manifest(corpus.path).next(ids="int", next_id=320_000, shards=tuple(entries)))
    assert sum(entry.bytes for entry in entries) > 20e9
    code = (
        "import json, sys, time, numpy as np, numkong_py as nk\n"
        "def memory():\n"
        "    return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "import filelock, xxhash, tqdm.auto\n"
        "query = nk.pack(np.ones((32, 128), np.float16), backend='serial')\n"
        "before, seconds = memory(), []\n"
        "for _ in range(5):\n"
        "    begin = time.perf_counter()\n"
        "    corpus = nk.Corpus.open(sys.argv[1])\n"
        "    seconds.append(time.perf_counter() - begin)\n"
        "after = memory()\n"
        "ids = [4000 * shard + 3999 - i for shard in (5, 70) for i in range(5)]\n"
        "scores, found = corpus.topk(query, 10, candidates=ids, threads=1)\n"
        "assert set(found.tolist()) == set(ids) and scores[0] > scores[2], (scores, found)\n"
        "print(json.dumps([seconds, after - before, memory() - after]))\n"
    )
    run = [sys.executable, "-c", code, str(corpus.path)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    seconds, opening, scoring = json.loads(done.stdout)
    milliseconds = " ".join(f"{1e3 * each:.1f}" for each in seconds)
    print(f"opened in {milliseconds} ms and {opening / 1e6:.1f} MB; 10 documents scored in {scoring / 1e6:.1f} MB")
    assert min(seconds) < 0.05 and opening < 20e6 and scoring < 10e6
