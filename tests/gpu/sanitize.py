"""One call of every kernel on small ragged shapes: ``compute-sanitizer --tool memcheck python tests/gpu/sanitize.py``.

racecheck reports accesses that mbarriers order through another lane of the warp (``__syncwarp``, then one arrival).
"""

from __future__ import annotations

import cupy as cp
import numpy as np

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
    cp.cuda.runtime.deviceSynchronize()
    print("done")


if __name__ == "__main__":
    main()
