"""The workloads of the bench: shapes, data and how they are made; the names are those of docs/performance.md.

Vectors are made in float32 from a seed and then rounded to the dtype, so every contender gets the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
CENTROIDS = 12
TOPICS, TOPICS_OF_A_DOCUMENT = 64, 3


@dataclass(frozen=True)
class Workload:
    """A shape and a kind of data.

    Attributes
    ----------
    name : str
    queries, query_tokens : int
    documents : int
    lengths : (int, int)
        Shortest and longest document.
    depth : int
    data : str
        A name of `DATA`.
    k : int
        0: full scores; else the best k documents of every query.
    dtypes : tuple of str
        Measured unless others are asked for.
    every_row : bool
        Whether all rows of ours are measured, not only the best one.
    """

    name: str
    queries: int = 1
    query_tokens: int = 32
    documents: int = 1000
    lengths: tuple[int, int] = (300, 300)
    depth: int = 128
    data: str = "random"
    k: int = 0
    dtypes: tuple[str, ...] = ("f32",)
    every_row: bool = False

    def smaller(self, factor: int) -> Workload:
        """The same with fewer documents, but at least ten."""
        return replace(self, documents=max(min(self.documents, 10), self.documents // factor))


@dataclass(frozen=True)
class Inputs:
    """Token vectors of a workload in one dtype.

    Attributes
    ----------
    queries : list of arrays
        ``[query_tokens, depth]`` each, all of one length.
    tokens : array
        ``[total, depth]``, of all documents.
    offsets : array
        int64 ``[documents + 1]``.
    """

    queries: list[np.ndarray]
    tokens: np.ndarray
    offsets: np.ndarray

    @property
    def documents(self) -> list[np.ndarray]:
        """One array a document, views."""
        return np.split(self.tokens, self.offsets[1:-1])

    @property
    def operations(self) -> int:
        """Multiplications and additions of all pairs of tokens."""
        return 2 * sum(len(query) for query in self.queries) * self.tokens.size

    def astype(self, dtype: str) -> Inputs:
        """The same, rounded to a dtype."""
        target = DTYPES[dtype]
        return replace(self, queries=[q.astype(target) for q in self.queries], tokens=self.tokens.astype(target))

    def padded(self) -> tuple[np.ndarray, np.ndarray]:
        """Documents as ``[documents, longest, depth]`` with zeros behind them, and which tokens are real."""
        lengths = np.diff(self.offsets)
        valid = np.arange(lengths.max()) < lengths[:, None]
        documents = np.zeros((*valid.shape, self.tokens.shape[1]), self.tokens.dtype)
        documents[valid] = self.tokens
        return documents, valid


# ------------------------------------------------------------------------------------------------------ data


def _unit(vectors: np.ndarray) -> np.ndarray:
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def _normal(rng: np.random.Generator, count: int, depth: int) -> np.ndarray:
    return rng.standard_normal((count, depth), dtype=np.float32)


def _random(rng: np.random.Generator, workload: Workload, queries: int, offsets: np.ndarray) -> tuple:
    return tuple(_unit(_normal(rng, count, workload.depth)) for count in (queries, int(offsets[-1])))


def _clustered(spread: float):
    """Tokens around few centroids, `spread` standard deviations from them in every element."""

    def make(rng: np.random.Generator, workload: Workload, queries: int, offsets: np.ndarray) -> tuple:
        centroids = _normal(rng, CENTROIDS, workload.depth)
        sides = []
        for count in (queries, int(offsets[-1])):
            vectors = centroids[rng.integers(0, CENTROIDS, count)]
            vectors += np.float32(spread) * _normal(rng, count, workload.depth)
            sides.append(_unit(vectors))
        return tuple(sides)

    return make


def _heavy_tailed(rng: np.random.Generator, workload: Workload, queries: int, offsets: np.ndarray) -> tuple:
    """Cubes of normals, with norms spread over orders of magnitude."""
    return tuple(
        _normal(rng, count, workload.depth) ** 3 * np.exp(_normal(rng, count, 1)) / np.float32(workload.depth**0.5)
        for count in (queries, int(offsets[-1]))
    )


def _near_duplicates(rng: np.random.Generator, workload: Workload, queries: int, offsets: np.ndarray) -> tuple:
    """Document tokens all within a thousandth of one vector, queries around it."""
    center = _normal(rng, 1, workload.depth)
    documents = center + np.float32(1e-3) * _normal(rng, int(offsets[-1]), workload.depth)
    return _unit(center + _normal(rng, queries, workload.depth)), _unit(documents)


def _related(spread: float):
    """Every document has three of 64 topics; queries are noisy copies of one document's tokens each."""

    def make(rng: np.random.Generator, workload: Workload, queries: int, offsets: np.ndarray) -> tuple:
        topics = _normal(rng, TOPICS, workload.depth)
        documents = np.repeat(np.arange(workload.documents), np.diff(offsets))
        chosen = rng.integers(0, TOPICS, (workload.documents, TOPICS_OF_A_DOCUMENT))
        topic = chosen[documents, rng.integers(0, TOPICS_OF_A_DOCUMENT, len(documents))]
        tokens = _unit(topics[topic] + np.float32(spread) * _normal(rng, len(documents), workload.depth))
        asked = np.repeat(rng.integers(0, workload.documents, workload.queries), workload.query_tokens)
        copied = tokens[offsets[asked] + rng.integers(0, np.diff(offsets)[asked])]
        noise = _unit(_normal(rng, queries, workload.depth)) * np.float32(spread)
        return _unit(copied + noise), tokens

    return make


DATA = {
    "random": _random,
    "clustered 1.0": _clustered(1.0),
    "clustered 0.5": _clustered(0.5),
    "clustered 0.2": _clustered(0.2),
    "clustered 0.05": _clustered(0.05),
    "related 0.5": _related(0.5),
    "heavy-tailed": _heavy_tailed,
    "near-duplicates": _near_duplicates,
}
UNNORMALISED = ("heavy-tailed",)


def _lengths(rng: np.random.Generator, workload: Workload) -> np.ndarray:
    """Uniform between short bounds; log-normal with a mean of about 130 where documents can be long."""
    shortest, longest = workload.lengths
    if longest <= 64:
        return rng.integers(shortest, longest + 1, workload.documents)
    return np.exp(rng.normal(4.7, 0.6, workload.documents)).clip(shortest, longest).astype(np.int64)


def make(workload: Workload, seed: int = 0) -> Inputs:
    """The float32 inputs of a workload, always the same."""
    if workload.data == "real":
        return _real(workload)
    rng = np.random.default_rng(seed)
    same = workload.lengths[0] == workload.lengths[1]
    lengths = np.full(workload.documents, workload.lengths[0]) if same else _lengths(rng, workload)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    queries, tokens = DATA[workload.data](rng, workload, workload.queries * workload.query_tokens, offsets)
    return Inputs(np.split(queries, workload.queries), tokens, offsets)


def _real(workload: Workload) -> Inputs:
    """Token vectors of the shipped demo: a question of `query_tokens` tokens against its passages.

    They are stored as int8 codes of unit vectors, and are unit vectors again.
    """
    from numkong_py import demo

    corpus = demo.load()
    queries = [vectors for vectors in corpus.question_vectors if len(vectors) == workload.query_tokens]
    documents = corpus.vectors[: workload.documents]
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    return Inputs(queries[: workload.queries], np.concatenate(documents), offsets)


# ------------------------------------------------------------------------------------------------- workloads

BOTH = ("f32", "bf16")
SHAPES = (
    Workload("rerank", dtypes=("f32", "bf16", "f16"), every_row=True),
    Workload("ragged", lengths=(30, 500), dtypes=BOTH),
    Workload("colpali", query_tokens=1024, documents=100, lengths=(1024, 1024), dtypes=BOTH, every_row=True),
    Workload("16x1000", queries=16, dtypes=BOTH),
    Workload("1x10", documents=10, dtypes=BOTH),
    Workload("d768", documents=200, depth=768, dtypes=BOTH),
    Workload("long", lengths=(1024, 1024)),
    Workload("d96", depth=96),
    Workload("d384", documents=400, depth=384),
    Workload("b100", documents=100),
    Workload("short-100k", documents=100_000, lengths=(5, 30)),
)
KINDS = tuple(
    Workload(f"data: {data}", data=data)
    for data in ("clustered 1.0", "clustered 0.5", "clustered 0.2", "clustered 0.05", "heavy-tailed", "near-duplicates")
)
REAL = Workload("data: real", query_tokens=15, documents=420, lengths=(30, 200), data="real")
TOP = (
    Workload("top-10: random", k=10),
    Workload("top-10: related", k=10, data="related 0.5"),
    replace(REAL, name="top-10: real", k=10),
)
STAGED = tuple(
    Workload(f"two-stage: {name}", documents=10_000, lengths=(120, 120), data=data, k=100)
    for name, data in (("random", "random"), ("related", "related 0.5"), ("clustered", "clustered 0.5"))
)
WORKLOADS = {workload.name: workload for workload in (*SHAPES, *KINDS, REAL, *TOP, *STAGED)}
