"""The command line over corpora: files, folders and JSON lines in, hits out, and what goes wrong."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import DEPTH, QUERIES, document, documents
from oracle import ROOT
from test_cli import error_of, json_of

import numkong_py as nk
from numkong_py.cli import main

NAMES = [f"page{number}" for number in range(12)]


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """A folder with a file for every document; the names sort by number, not by letter."""
    folder = tmp_path / "pages"
    folder.mkdir()
    for name in NAMES:
        np.save(folder / f"{name}.npy", document(name))
    (folder / "notes.txt").write_text("no vectors")
    return folder


@pytest.fixture
def corpus(pages: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A corpus of the pages, appended by the command line."""
    path = pages.parent / "corpus"
    fields = path.parent / "fields.jsonl"
    fields.write_text("".join(json.dumps({"title": f"t {name}", "size": len(document(name))}) + "\n" for name in NAMES))
    facts = json_of(capsys, "append", path, pages, "--metadata", fields)
    assert (facts["created"], facts["appended"], facts["ids"], facts["depth"]) == (True, 12, "str", DEPTH)
    return path


def lines_of(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(lines))
    return path


def line(**fields: Any) -> str:
    return json.dumps(fields) + "\n"


def hits_of(scores: Any, ids: Any) -> list[list[dict[str, Any]]]:
    """What the JSON must hold: infinities are null."""
    none = (None, -1)
    return [
        [{"id": id, "score": score if np.isfinite(score) else None} for id, score in zip(*row) if id not in none]
        for row in zip(np.atleast_2d(ids).tolist(), np.atleast_2d(scores).tolist())
    ]


def test_append_search_delete_compact(corpus: Path, pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = nk.Corpus.open(corpus)
    assert opened.ids.tolist() == NAMES
    assert opened.metadata["title"].tolist() == [f"t {name}" for name in NAMES]
    np.savez(pages.parent / "queries.npz", *QUERIES)
    np.save(pages.parent / "query.npy", QUERIES[0])
    for metric in ("dot", "angular"):
        facts = json_of(capsys, "search", pages.parent / "queries.npz", corpus, "-k", 4, "--metric", metric)
        assert facts["hits"] == hits_of(*opened.topk(QUERIES, 4, metric=metric))
        assert (facts["documents"], facts["corpus"]) == (12, str(corpus))
    facts = json_of(capsys, "delete", corpus, "page3", "page10")
    assert (facts["deleted_now"], facts["documents"], facts["deleted"]) == (2, 10, 2)
    assert "page3" in error_of(capsys, "delete", corpus, "page3")
    ids = lines_of(pages.parent / "ids", ["page3\n", "\n", "page4\n"])
    assert json_of(capsys, "delete", corpus, "--ids", ids, "--ignore-missing")["deleted_now"] == 1
    facts = json_of(capsys, "compact", corpus)
    assert facts["bytes_saved"] > 0 and (facts["deleted"], facts["documents"]) == (0, 9)
    np.save(pages / "page3.npy", document("page3"))
    facts = json_of(capsys, "append", corpus, pages / "page3.npy", "--ids", lines_of(ids, ["page3\n"]))
    assert (facts["created"], facts["appended"]) == (False, 1)
    assert json_of(capsys, "inspect", corpus)["documents"] == 10
    assert main(["inspect", str(corpus)]) == 0
    assert "generation" in capsys.readouterr().out


def test_filters_candidates_thresholds_fields(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = nk.Corpus.open(corpus)
    query = tmp_path / "query.npy"
    np.save(query, QUERIES[0])
    np.save(tmp_path / "three.npy", np.stack([QUERIES[0]] * 3))
    some = lines_of(tmp_path / "some", [f"{name}\n" for name in NAMES[2:9]])
    assert json_of(capsys, "search", query, corpus, "--include", some)["hits"] == hits_of(
        *opened.topk(QUERIES[0], 10, include=NAMES[2:9])
    )
    assert json_of(capsys, "search", query, corpus, "--exclude", some)["hits"] == hits_of(
        *opened.topk(QUERIES[0], 10, exclude=NAMES[2:9])
    )
    lists = [NAMES[:3], ["page5"], []]
    listed = lines_of(
        tmp_path / "lists.jsonl", [line(candidates=lists[0]), *(json.dumps(each) + "\n" for each in lists[1:])]
    )
    facts = json_of(capsys, "search", tmp_path / "three.npy", corpus, "--candidates", listed, "-k", 2)
    assert facts["hits"] == hits_of(*opened.topk([QUERIES[0]] * 3, 2, candidates=lists))
    one = lines_of(tmp_path / "one.jsonl", [json.dumps([*NAMES[:3], "gone"])])
    assert "gone" in error_of(capsys, "search", query, corpus, "--candidates", one)
    facts = json_of(capsys, "search", query, corpus, "--candidates", one, "--ignore-missing", "--fields")
    assert [hit["id"] for hit in facts["hits"][0]] == opened.topk(QUERIES[0], 3, candidates=NAMES[:3])[1].tolist()
    assert all(hit["fields"]["title"] == f"t {hit['id']}" for hit in facts["hits"][0])
    least = float(opened.topk(QUERIES[0], 4, reduction="mean")[0][3])
    facts = json_of(capsys, "search", query, corpus, "--min-mean-score", least, "--block", 2, "--alignment")
    assert len(facts["hits"][0]) == 4
    for hit in facts["hits"][0]:
        aligned = opened.alignment(QUERIES[0], hit["id"])
        assert hit["argmax"] == aligned.argmax.tolist() and hit["token_scores"] == aligned.token_scores.tolist()
    assert main(["search", str(query), str(corpus), "-k", "1", "--fields"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("query 0\n   1. id page") and '{"title": "t page' in text


def test_packed_files_take_candidates_and_thresholds(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed, query = pages.parent / "all.nk", pages.parent / "query.npy"
    np.save(query, QUERIES[0])
    facts = json_of(capsys, "pack", pages, "-o", packed)
    assert [tokens.tobytes() for tokens in nk.open(packed).unpack()] == [document(name).tobytes() for name in NAMES]
    assert facts["documents"] == 12
    _, places = nk.topk(QUERIES[0], nk.open(packed), 2, candidates=[[4, 5, -1]])
    table = lines_of(pages.parent / "table.jsonl", ["[4, 5, -1]"])
    np.save(pages.parent / "table.npy", [[4, 5, -1]])
    for given in (table, pages.parent / "table.npy"):
        facts = json_of(capsys, "search", query, packed, "-k", 2, "--candidates", given)
        assert [hit["document"] for hit in facts["hits"][0]] == places.tolist()
    means = nk.topk(QUERIES[0], nk.open(packed), 3, reduction="mean")[0]
    facts = json_of(capsys, "search", query, packed, "--min-mean-score", float(means[2]))
    assert len(facts["hits"][0]) == 3
    assert "wanted a corpus" in error_of(capsys, "search", query, packed, "--include", table)
    exported = json_of(capsys, "export", packed, "-o", pages.parent / "out.npz", "--as-list")
    assert exported["documents"] == 12
    assert json_of(capsys, "pack", pages.parent / "out.npz", "-o", packed)["documents"] == 12


def test_json_lines_in_and_out(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = lines_of(
        tmp_path / "new.jsonl",
        [line(id=f"new{i}", vectors=document(f"new{i}").tolist(), title=f"n{i}") for i in range(70)],
    )
    facts = json_of(capsys, "append", corpus, new)
    assert facts["appended"] == 70
    opened = nk.Corpus.open(corpus)
    assert opened["new69"].unpack().tobytes() == document("new69").tobytes()
    assert opened.metadata.rows(["new7"])[0]["title"] == "n7"
    queries = lines_of(tmp_path / "q.jsonl", [line(query=f"q{i}", vectors=QUERIES[i % 3].tolist()) for i in range(70)])
    assert main(["search", str(queries), str(corpus), "-k", "3", "--lines"]) == 0
    answers = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert [answer["query"] for answer in answers] == [f"q{i}" for i in range(70)]
    wanted = hits_of(*opened.topk(QUERIES, 3))
    assert [answer["hits"] for answer in answers] == [wanted[i % 3] for i in range(70)]
    assert json_of(capsys, "search", queries, corpus, "-k", 3)["hits"] == [answer["hits"] for answer in answers]
    ranked = lines_of(
        tmp_path / "r.jsonl",
        [line(query=i, vectors=QUERIES[0].tolist(), candidates=[f"new{i}", "page1"]) for i in range(3)],
    )
    for flags in (["--lines"], ["--json"]):
        assert main(["search", str(ranked), str(corpus), *flags]) == 0
        out = capsys.readouterr().out.splitlines()
        found = [json.loads(each)["hits"] for each in out] if flags == ["--lines"] else json.loads(out[0])["hits"]
        assert [{hit["id"] for hit in hits} for hits in found] == [{f"new{i}", "page1"} for i in range(3)]
    np.savez(tmp_path / "queries.npz", *QUERIES)
    assert main(["search", str(tmp_path / "queries.npz"), str(corpus), "-k", "3", "--lines"]) == 0
    assert [json.loads(each)["hits"] for each in capsys.readouterr().out.splitlines()] == wanted


def test_export_of_a_corpus(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_of(capsys, "delete", corpus, "page3")
    assert json_of(capsys, "export", corpus, "-o", tmp_path / "out.npz")["documents"] == 11
    again = tmp_path / "again"
    json_of(capsys, "append", again, tmp_path / "out.npz")
    first, second = nk.Corpus.open(corpus), nk.Corpus.open(again)
    assert list(first) == list(second) == [name for name in NAMES if name != "page3"]
    assert all(first[id].unpack().tobytes() == second[id].unpack().tobytes() for id in first)
    json_of(capsys, "delete", again, *second)
    assert "no documents" in error_of(capsys, "export", again, "-o", tmp_path / "x.npz")


def test_standard_input(corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(line(id="é", vectors=document("é").tolist())))
    assert json_of(capsys, "append", corpus, "-")["appended"] == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("é\n"))
    assert json_of(capsys, "delete", corpus, "--ids", "-")["deleted_now"] == 1


def test_int_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus"
    np.savez(tmp_path / "a.npz", *documents(range(5)))
    assert json_of(capsys, "append", corpus, tmp_path / "a.npz")["ids"] == "int"
    np.savez(
        tmp_path / "b.npz",
        tokens=np.concatenate(documents([70, 60])),
        offsets=np.cumsum([0, *map(len, documents([70, 60]))]),
        ids=[70, 60],
    )
    json_of(capsys, "append", corpus, tmp_path / "b.npz")
    assert nk.Corpus.open(corpus).ids.tolist() == [0, 1, 2, 3, 4, 70, 60]
    assert json_of(capsys, "delete", corpus, 70)["deleted_now"] == 1
    assert "has numbers for ids" in error_of(capsys, "delete", corpus, "seventy")
    ids = lines_of(tmp_path / "ids", ["08\n", "9\n"])
    packed = tmp_path / "two.nk"
    nk.pack(documents([8, 9])).save(packed)
    assert json_of(capsys, "append", tmp_path / "other", packed, "--ids", ids)["ids"] == "str"
    assert nk.Corpus.open(tmp_path / "other").ids.tolist() == ["08", "9"]


def test_verify(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, verified in (([], "header"), (["--full"], "full")):
        facts = json_of(capsys, "verify", corpus, *arguments)
        assert (facts["verified"], facts["documents"]) == (verified, 12)
    path = nk.Corpus.open(corpus).shards[0].path
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    assert main(["verify", str(corpus)]) == 0
    capsys.readouterr()
    assert path.name in error_of(capsys, "verify", corpus, "--full")
    whole[20] ^= 1
    path.write_bytes(whole)
    assert path.name in error_of(capsys, "verify", corpus)


def test_wrong_input(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = nk.Corpus.open(corpus).info()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "a folder without" in error_of(capsys, "append", corpus, empty)
    assert "a folder without" in error_of(capsys, "pack", empty, "-o", tmp_path / "x")
    for text, message in [
        ("nonsense\n", "line 1: no JSON"),
        ("[1]\n", 'wanted an object with "vectors"'),
        (line(id="a", vectors=[[1, 2], [3]]), "wanted lists of as many numbers"),
        (line(id="a", vectors=[1, 2]), "shape (2,)"),
        (line(id="a", vectors=[]), "depth is not known"),
        (line(id="a", vectors=[[1.0] * (DEPTH + 1)]), "depth 9"),
        (line(id="page1", vectors=[[1.0] * DEPTH]), "'page1' belongs to a document"),
        (line(vectors=[[1.0] * DEPTH]), "pass one for every document"),
        ("", "no documents"),
    ]:
        assert message in error_of(capsys, "append", corpus, lines_of(tmp_path / "x.jsonl", [text]))
    mixed = [line(id=f"x{i}", vectors=[[1.0] * DEPTH]) for i in range(64)] + [line(vectors=[[1.0] * DEPTH])]
    assert "some documents have ids" in error_of(capsys, "append", corpus, lines_of(tmp_path / "x.jsonl", mixed))
    query = tmp_path / "q.npy"
    np.save(query, QUERIES[0])
    bad = lines_of(tmp_path / "c.jsonl", ['{"candidates": 3}'])
    assert "wanted a list of ids" in error_of(capsys, "search", query, corpus, "--candidates", bad)
    assert "no lines" in error_of(capsys, "search", lines_of(tmp_path / "q.jsonl", [""]), corpus)
    half = [line(vectors=[[1.0] * DEPTH], candidates=["page1"]), line(vectors=[[1.0] * DEPTH])]
    assert "1 of 2 lines have no" in error_of(capsys, "search", lines_of(tmp_path / "q.jsonl", half), corpus)
    assert "no corpus is here" in error_of(capsys, "delete", empty, "a")
    assert nk.Corpus.open(corpus).info() == before
    assert not (tmp_path / "x").exists()


def test_as_a_pipe(corpus: Path) -> None:
    command = (
        f"set -o pipefail; head -c 100000 | {sys.executable} -m numkong_py search - {corpus} -k 1 --lines | head -n 1"
    )
    queries = "".join(line(query=i, vectors=QUERIES[0].tolist()) for i in range(200))
    done = subprocess.run(
        ["bash", "-c", command],
        input=queries,
        cwd=corpus.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    answer = json.loads(done.stdout)
    assert answer["query"] == 0 and answer["hits"] == hits_of(*nk.Corpus.open(corpus).topk(QUERIES[0], 1))[0]
    assert "Traceback" not in done.stderr
