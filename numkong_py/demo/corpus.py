"""The shipped corpus: passages of the World Factbook with one 128-dimensional vector a token.

The vectors are stored as int8 codes, round(127 x) of each component of a unit vector, and are unit vectors again once
their codes are divided by their length: half the bytes of float16, and no scale to keep.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent
DEPTH = 128
CODE_SCALE = 127.0

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class DemoCorpus:
    """Passages, questions, and their token vectors.

    Attributes
    ----------
    ids, passages : tuple of str
        Name (``"Iceland/geography"``) and text of each passage.
    vectors : list of ndarray
        Per passage ``[tokens, 128]`` float32 unit vectors, one for each word piece; no special tokens.
    spans : list of list of (int, int)
        Per passage the characters ``passage[start:end]`` of each token.
    questions : tuple of str
        Questions that people would ask.
    question_vectors, question_spans
        As for passages, but with the model's ``[CLS]`` first and ``[SEP]`` last, whose spans are empty.
    answers : tuple of tuple of str
        Per question the ids of the passages that answer it.

    Examples
    --------
    >>> from numkong_py import demo
    >>> corpus = demo.load()
    >>> corpus.vectors[0].shape[1]
    128
    """

    ids: tuple[str, ...]
    passages: tuple[str, ...]
    vectors: list[np.ndarray]
    spans: list[Spans]
    questions: tuple[str, ...]
    question_vectors: list[np.ndarray]
    question_spans: list[Spans]
    answers: tuple[tuple[str, ...], ...]


def encode(vectors: np.ndarray) -> np.ndarray:
    """Round unit vectors ``[tokens, depth]`` to int8 codes."""
    return np.rint(vectors * CODE_SCALE).astype(np.int8)


def decode(codes: np.ndarray) -> np.ndarray:
    """Expand int8 codes ``[tokens, depth]`` to float32 unit vectors."""
    vectors = np.ascontiguousarray(codes, dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@functools.cache
def load() -> DemoCorpus:
    """Read the shipped corpus (about 0.1 s, 13 MB); read once, then the same object."""
    texts = json.loads((DATA / "corpus.json").read_text(encoding="utf-8"))
    with np.load(DATA / "vectors.npz") as arrays:
        vectors, spans = _unflatten(arrays["codes"], arrays["spans"], arrays["offsets"])
        question_vectors, question_spans = _unflatten(
            arrays["question_codes"], arrays["question_spans"], arrays["question_offsets"]
        )
    return DemoCorpus(
        ids=tuple(passage["id"] for passage in texts["passages"]),
        passages=tuple(passage["text"] for passage in texts["passages"]),
        vectors=vectors,
        spans=spans,
        questions=tuple(question["text"] for question in texts["questions"]),
        question_vectors=question_vectors,
        question_spans=question_spans,
        answers=tuple(tuple(question["answers"]) for question in texts["questions"]),
    )


def _unflatten(codes: np.ndarray, spans: np.ndarray, offsets: np.ndarray) -> tuple[list[np.ndarray], list[Spans]]:
    cuts = offsets[1:-1]
    pairs = [[(start, end) for start, end in part.tolist()] for part in np.split(spans, cuts)]
    return np.split(decode(codes), cuts), pairs
