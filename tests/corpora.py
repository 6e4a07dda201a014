"""What the tests of corpora share: documents that their id says all about, and a corpus kept as a plain list."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from oracle import assert_same_bits

import numkong_py as nk
from numkong_py.corpus.manifest import MANIFEST, read_manifest
from numkong_py.corpus.writer import HOLDER, LOCK

DEPTH = 8
QUERIES = [np.random.default_rng(8).standard_normal((count, DEPTH)).astype(np.float32) for count in (4, 0, 9)]


def document(id: Any) -> np.ndarray:
    """The tokens of the document with an id: 0 to 8 of them."""
    rng = np.random.default_rng(list(str(id).encode()))
    return rng.standard_normal((int(rng.integers(0, 9)), DEPTH)).astype(np.float32)


def documents(ids: Any) -> list[np.ndarray]:
    """The documents of ids."""
    return [document(id) for id in ids]


def topk(ids: list[Any], k: int, queries: Any = QUERIES, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """What a corpus of these documents, in this order, must answer, from one packed tensor."""
    scores, places = nk.topk(queries, nk.pack(documents(ids), depth=DEPTH), k, **options)
    names = np.array([*ids, None if ids and isinstance(ids[0], str) else -1], object)  # place -1 is the last
    found = names[places]
    return scores, found if any(isinstance(id, str) for id in ids) else found.astype(np.int64)


def assert_holds(corpus: nk.Corpus, ids: list[Any]) -> None:
    """The corpus has these documents, in this order, and finds what it should with the same bits."""
    assert len(corpus) == len(ids)
    assert corpus.ids.tolist() == list(ids)
    if not ids:
        return
    k = min(5, len(ids) + 1)
    scores, found = corpus.topk(QUERIES, k)
    wanted, names = topk(list(ids), k)
    assert_same_bits(scores, wanted)
    assert found.tolist() == names.tolist()


def assert_tidy(path: Path) -> None:
    """Nothing lies in the folder that the manifest does not name."""
    assert set(os.listdir(path)) - {LOCK, HOLDER} == read_manifest(path).files | {MANIFEST}
