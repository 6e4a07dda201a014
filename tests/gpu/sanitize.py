"""One call of every kernel on small ragged shapes: ``compute-sanitizer --tool memcheck python tests/gpu/sanitize.py``.

racecheck reports accesses that mbarriers order through another lane of the warp (``__syncwarp``, then one arrival).
"""

from __future__ import annotations

import cupy as cp
import numpy as np

import numkong_py as nk
from numkong_py import cuda

LENGTHS = [0, 1, 63, 64, 65, 130, 300]


def main() -> None:
    rng = np.random.default_rng(1)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    for dtype in (np.float16, np.float32):
        for depth in (40, 128, 136):
            tokens = cp.asarray(rng.standard_normal((offsets[-1], depth)).astype(dtype))
            queries = cp.asarray(rng.standard_normal((3, 33, depth)).astype(dtype))
            long = cp.asarray(rng.standard_normal((300, depth)).astype(dtype))
            for row in ("sm90", "sm80"):
                documents = cuda.pack(tokens, offsets=offsets, row=row)
                for query in (queries, long):
                    cuda.score(query, documents, return_argmax=True)
                    cuda.score(query, documents)
                cuda.score(queries, documents, metric="cosine")
                cuda.score(queries, documents, candidates=np.array([[1, 2, -1]] * 3))
                cuda.topk(queries, documents, 4)
    gradients(rng)
    cp.cuda.runtime.deviceSynchronize()
    print("done")


def gradients(rng: np.random.Generator) -> None:
    def on_device(*shape: int, dtype: type = np.float32) -> cp.ndarray:
        return cp.asarray(rng.standard_normal(shape).astype(dtype))

    for dtype in (np.float16, np.float32):
        for depth in (33, 128, 136):
            queries, documents = (
                [on_device(n, depth, dtype=dtype) for n in counts] for counts in ((32, 0, 70), (0, 1, 64, 300, 65))
            )
            for metric in ("dot", "cosine"):
                nk.maxsim_grad(queries, documents, 1.5, metric=metric, reduction="mean")
            nk.maxsim_candidates_grad(queries, documents, cp.asarray(rng.integers(-1, 6, (3, 7))), 1.0)
            many = on_device(80, 32, depth, dtype=dtype)
            padded = nk.collection(on_device(3, 90, depth, dtype=dtype), mask=rng.random((3, 90)) < 0.5)
            nk.maxsim_grad(many, padded, 1.0)
            nk.maxsim_grad(padded, many, 1.0, metric="cosine")
    for depth in (3, 20):
        p, q = ([on_device(n, depth) for n in counts] for counts in ((70, 0, 1100, 5), (300, 5, 2500, 0)))
        nk.chamfer(p, q)
        nk.chamfer_grad(p, q)
        nk.chamfer_grad(p, q, squared=False)


if __name__ == "__main__":
    main()
