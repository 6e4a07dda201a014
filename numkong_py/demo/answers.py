"""Pack the corpus, rank its passages for a question, and say which tokens decided."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from ..errors import InvalidArgument
from ..ops import maxsim, topk
from ..packed import pack
from .corpus import DemoCorpus, Spans, load
from .embedder import embed

# A token of the question that is near something in every passage ("which", "the") decides nothing. What counts is how
# much of the way from its average over the corpus to 1, the most there is, its similarity here has made: this much.
TELLING = 0.6

_WORD = re.compile(r"\w+(?:['\u2019]\w+)*")


@dataclass(frozen=True)
class Match:
    """A word of the question and the word of the passage, characters ``text[start:end]``, that its best token met."""

    asked: str
    met: str
    start: int
    end: int
    similarity: float


@dataclass(frozen=True)
class Hit:
    """A passage in the ranking; ``score`` is the mean over the question's tokens, 1 at most."""

    rank: int
    id: str
    text: str
    score: float
    matches: tuple[Match, ...]


@dataclass(frozen=True)
class Answer:
    """A question and its best passages; ``correct`` says if the first is a known answer (None: not known)."""

    question: str
    hits: tuple[Hit, ...]
    correct: bool | None


@dataclass(frozen=True)
class Report:
    """What ran, on what, how long it took, and the answers."""

    backend: str
    dtype: str
    passages: int
    tokens: int
    packed_bytes: int
    pack_seconds: float
    search_seconds: float
    answers: tuple[Answer, ...]

    def to_dict(self) -> dict[str, object]:
        """Give all of it as plain dicts, lists, strings and numbers, ready for JSON."""
        return asdict(self)


def run(question: str | None = None, k: int = 3, *, backend: str | None = None, threads: int | None = None) -> Report:
    """Answer a question, or all the shipped ones, from the shipped corpus.

    Parameters
    ----------
    question : str, optional
        A question of one's own (needs the ``demo`` extra, unless it is one of the shipped ones).
    k : int
        How many passages to rank.
    backend, threads
        As for `numkong_py.pack` and `numkong_py.topk`.

    Returns
    -------
    Report

    Raises
    ------
    MissingDemoExtra
        The question is not a shipped one and the extra is not installed.
    InvalidArgument
        ``k`` is below 1, or the question is empty or too long.

    Examples
    --------
    >>> from numkong_py import demo
    >>> report = demo.run("Which island did the dodo live on?", k=1)
    >>> report.answers[0].hits[0].id
    'Mauritius/geography'
    """
    if k < 1:
        raise InvalidArgument(f"k is {k}; pass how many passages to rank, 1 or more")
    corpus = load()
    questions, queries, spans = _questions(corpus, question)

    started = time.perf_counter()
    packed = pack(corpus.vectors, backend=backend)
    packed_at = time.perf_counter()
    scores, best = topk(queries, packed, min(k, len(corpus.passages)), reduction="mean", threads=threads)
    searched_at = time.perf_counter()

    explained = maxsim(queries, packed, threads=threads, return_argmax=True, return_token_scores=True)
    tokens = zip(explained.argmax, explained.token_scores)
    rankings = zip(best.tolist(), scores.tolist())
    return Report(
        backend=str(packed.backend),
        dtype=str(packed.dtype),
        passages=len(corpus.passages),
        tokens=sum(map(len, corpus.vectors)),
        packed_bytes=int(packed.nbytes),
        pack_seconds=packed_at - started,
        search_seconds=searched_at - packed_at,
        answers=tuple(map(partial(_answer, corpus), questions, spans, rankings, tokens)),
    )


def _questions(corpus: DemoCorpus, question: str | None) -> tuple[tuple[str, ...], list[np.ndarray], list[Spans]]:
    if question is None:
        return corpus.questions, corpus.question_vectors, corpus.question_spans
    if question in corpus.questions:
        i = corpus.questions.index(question)
        return (question,), [corpus.question_vectors[i]], [corpus.question_spans[i]]
    vectors, spans = embed(question)
    return (question,), [vectors], [spans]


def _answer(
    corpus: DemoCorpus,
    question: str,
    spans: Spans,
    ranking: tuple[list[int], list[float]],
    tokens: tuple[np.ndarray, np.ndarray],
) -> Answer:
    """Put a ranking into words; ``tokens`` are argmax and similarity, each ``[passages, question tokens]``."""
    argmax, similarity = (part[:, : len(spans)] for part in tokens)
    average = similarity.mean(axis=0)
    progress = (similarity - average) / (1 - average)
    hits = []
    for rank, (i, score) in enumerate(zip(*ranking), start=1):
        winners = [corpus.spans[i][token] for token in argmax[i].tolist()]
        matches = _matches(question, spans, corpus.passages[i], winners, similarity[i], progress[i])
        hits.append(Hit(rank, corpus.ids[i], corpus.passages[i], score, matches))
    known = dict(zip(corpus.questions, corpus.answers)).get(question)
    return Answer(question, tuple(hits), hits[0].id in known if known else None)


def _matches(
    question: str, spans: Spans, passage: str, winners: Spans, similarity: np.ndarray, progress: np.ndarray
) -> tuple[Match, ...]:
    """Pick the pairs of words that tell this passage from the others, the most telling first, each place once."""
    matches: dict[int, Match] = {}
    for token in np.argsort(-progress, kind="stable").tolist():
        if progress[token] < TELLING:
            break
        asked = _word_at(question, spans[token])
        met = _word_at(passage, winners[token])
        if asked and met and met.start() not in matches:
            matches[met.start()] = Match(asked[0], met[0], met.start(), met.end(), float(similarity[token]))
    return tuple(matches.values())


def _word_at(text: str, span: tuple[int, int]) -> re.Match[str] | None:
    """Find the whole word that a token is a piece of; none for punctuation and special tokens."""
    start, end = span
    words = _WORD.finditer(text)
    return next((word for word in words if word.start() <= start < end <= word.end()), None)
