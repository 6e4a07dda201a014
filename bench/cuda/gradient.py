"""Training benches on a CUDA device: ``python bench/cuda/gradient.py out.jsonl [part ...] [shape ...]``.

Parts: ``maxsim``, backward alone, forward with backward and the memory of both; ``chamfer``, the distance of two
clouds; ``peers``, torch, flash-maxsim and late-interaction-kernels in the same run, each in a process of its own that
ends after `PEER_SECONDS`, on the shapes named, such as ``32x1000,32x300``. One JSON record a line; times are medians of
CUDA events, ours from graph replays.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

# queries, documents, query tokens, document tokens: targets in ms, backward alone and forward with backward
MAXSIM = {
    (32, 1000, 32, 300): (0.11, 0.28),
    (64, 64, 1024, 1024): (0.36, 2.3),
    (128, 128, 1024, 1024): (1.4, 9.0),
    (1024, 1024, 32, 300): (2.2, 7.5),
    (1, 1000, 1024, 1024): (0.16, None),
}
DEPTH = 128
CLOUDS = (32768, 100_000)  # points
FAR = 1000.0  # offset of clouds from the origin
PEER_SECONDS = 60


def name_of(shape: tuple[int, ...]) -> str:
    return f"{shape[0]}x{shape[1]},{shape[2]}x{shape[3]},d{DEPTH},bf16"


# ------------------------------------------------------------------------------------- ours


def maxsim_record(shape: tuple[int, ...]) -> dict[str, Any]:
    import cupy as cp
    import numpy as np

    import numkong_py as nk
    from bench.cuda.forward import tokens_of
    from bench.cuda.timing import kernel_ms
    from numkong_py import cuda

    query_count, count, query_tokens, tokens = shape
    raw = [
        tokens_of(query_count * query_tokens, DEPTH, "bf16", 1).reshape(query_count, query_tokens, DEPTH),
        tokens_of(count * tokens, DEPTH, "bf16", 2).reshape(count, tokens, DEPTH),
    ]
    q, d = (nk.pack(nk.collection(x, dtype="bf16")) for x in raw)
    upstream = cp.random.standard_normal((query_count, count), dtype=np.float32)
    winners = [cuda.score(q.pointer, d.pointer, return_argmax=True).argmax]
    pool = cp.get_default_memory_pool()

    def backward(need: Any = ("queries", "documents"), dtype: str = "bf16") -> Any:
        return nk.maxsim_grad(q, d, upstream, argmax=winners[0], need=need, grad_dtype=nk.dtypes.NUMPY_DTYPES[dtype])

    def step() -> Any:
        forward = cuda.score(q.pointer, d.pointer, return_argmax=True)
        return nk.maxsim_grad(q, d, upstream, argmax=forward.argmax, grad_dtype=nk.dtypes.NUMPY_DTYPES["bf16"])

    record = {
        "backward_ms": kernel_ms([backward]),
        "query_gradient_ms": kernel_ms([lambda: backward("queries")]),
        "document_gradient_ms": kernel_ms([lambda: backward("documents")]),
        "backward_f32_ms": kernel_ms([lambda: backward(dtype="f32")]),
        "step_ms": kernel_ms([step]),
        "forward_argmax_ms": kernel_ms([lambda: cuda.score(q.pointer, d.pointer, return_argmax=True)]),
    }
    winner_bytes = winners.pop().nbytes
    pool.free_all_blocks()
    before = pool.used_bytes()
    peak = peak_bytes(lambda: nk.maxsim_grad(q, d, upstream, grad_dtype=nk.dtypes.NUMPY_DTYPES["bf16"]))
    outputs = 2 * DEPTH * (query_count * query_tokens + count * tokens)
    record["peak_extra_bytes"] = peak - before
    record["allowed_bytes"] = outputs + winner_bytes + (64 << 20)
    return record


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most bytes of the device's pool in use at once during a call."""
    import cupy as cp

    class Peak(cp.cuda.MemoryHook):
        name = "peak"
        most = 0

        def malloc_postprocess(self, **event: Any) -> None:
            self.most = max(self.most, cp.get_default_memory_pool().used_bytes())

    with Peak() as hook:
        kept = call()
        cp.cuda.runtime.deviceSynchronize()
    del kept
    return hook.most


def chamfer_record(points: int, offset: float) -> dict[str, Any]:
    import cupy as cp
    import numpy as np

    import numkong_py as nk
    from bench.cuda.timing import kernel_ms

    cp.random.seed(3)
    p, q = (cp.random.random((points, 3), dtype=np.float32) + np.float32(offset) for _ in range(2))

    def step() -> Any:
        found = nk.chamfer(p, q, return_nearest=True)
        return nk.chamfer_grad(p, q, nearest=(found.nearest_of_p, found.nearest_of_q))

    record: dict[str, Any] = {"forward_ms": kernel_ms([lambda: nk.chamfer(p, q)]), "step_ms": kernel_ms([step])}
    record["distance"] = float(nk.chamfer(p, q))
    record["relative_error"] = abs(record["distance"] / exact_chamfer(p.get(), q.get()) - 1)
    return record


def exact_chamfer(p: Any, q: Any) -> float:
    """In f64 on the host, from a tree over the points."""
    import numpy as np
    from scipy.spatial import cKDTree

    p, q = p.astype(np.float64), q.astype(np.float64)
    return float(sum((cKDTree(b).query(a, workers=-1)[0] ** 2).mean() for a, b in ((p, q), (q, p))))


# ------------------------------------------------------------------------------------- peers


def torch_ms(call: Callable[[], Any], rounds: int = 9) -> float:
    import torch

    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def maxsim_peer(peer: str, shape: tuple[int, ...]) -> dict[str, Any]:
    import torch

    query_count, count, query_tokens, tokens = shape
    generator = torch.Generator("cuda").manual_seed(1)

    def unit(*size: int) -> Any:
        x = torch.randn(*size, DEPTH, generator=generator, device="cuda")
        return torch.nn.functional.normalize(x, dim=-1).bfloat16().requires_grad_(True)

    q, d = unit(query_count, query_tokens), unit(count, tokens)
    upstream = torch.randn(query_count, count, generator=generator, device="cuda")
    if peer == "torch":

        def score() -> Any:
            return torch.einsum("qid,bjd->qbij", q, d).amax(-1).float().sum(-1)
    elif peer == "flash-maxsim":
        from flash_maxsim import flash_maxsim_batched_train

        def score() -> Any:
            return flash_maxsim_batched_train(q, d)
    else:
        from late_interaction_kernels.autograd import maxsim

        def score() -> Any:
            return maxsim(q, d)

    def step() -> None:
        q.grad = d.grad = None
        score().backward(upstream)

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    record = {"step_ms": torch_ms(step), "peak_extra_bytes": peak}
    scores = score()
    record["backward_ms"] = torch_ms(lambda: torch.autograd.grad(scores, (q, d), upstream, retain_graph=True))
    return record


def chamfer_peer(peer: str, points: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator("cuda").manual_seed(1)
    p, q = (torch.rand(points, 3, generator=generator, device="cuda").requires_grad_(True) for _ in range(2))
    if peer == "flash-maxsim":
        from flash_maxsim import flash_chamfer, flash_chamfer_invgrid_train, flash_chamfer_train

        def forward() -> Any:
            return flash_chamfer(p, q)

        trains = {"step_ms": flash_chamfer_train, "step_csr_ms": flash_chamfer_invgrid_train}
    else:

        def naive(p: Any, q: Any) -> Any:
            squares = (p[:, None] - q[None]).square().sum(-1)
            return squares.amin(1).mean() + squares.amin(0).mean()

        def forward() -> Any:
            with torch.no_grad():
                return naive(p, q)

        trains = {"step_ms": naive}
    record: dict[str, Any] = {"forward_ms": torch_ms(forward)}
    for name, train in trains.items():

        def step(train: Callable[..., Any] = train) -> None:
            p.grad = q.grad = None
            train(p, q).backward()

        record[name] = torch_ms(step, 5)
    far_p, far_q = p.detach() + FAR, q.detach() + FAR
    if peer == "flash-maxsim":
        record["distance_far"], record["distance"] = float(flash_chamfer(far_p, far_q)), float(forward())
    return record


def in_own_process(kind: str, peer: str, *shape: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--peer", kind, peer, *map(str, shape)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {PEER_SECONDS} s"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------------------------- all of it


def main(path: str, chosen: list[str]) -> None:
    from bench.cuda.timing import stamp

    about = stamp()
    parts = {one for one in chosen if one[0].isalpha()} or {"maxsim", "chamfer", "peers"}
    shapes = [one for one in chosen if one[0].isdigit()]

    def write(file: Any, workload: str, by: str, record: dict[str, Any]) -> None:
        file.write(json.dumps({"workload": workload, "by": by, **record, **about}) + "\n")
        file.flush()
        shown = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in record.items()}
        print(f"{workload:36s} {by:26s} {shown}", flush=True)

    with open(path, "a") as file:
        for shape, targets in MAXSIM.items() if "maxsim" in parts else ():
            try:
                record = maxsim_record(shape)
            except Exception as error:  # one shape that fails must not hide the others
                record = {"error": repr(error)[:300]}
            write(file, f"grad,{name_of(shape)}", "numkong-py", {**record, "most_ms": targets})
        for points in CLOUDS if "chamfer" in parts else ():
            for offset in (0.0, FAR):
                try:
                    record = chamfer_record(points, offset)
                except Exception as error:
                    record = {"error": repr(error)[:300]}
                write(file, f"chamfer,{points}x{points},d3,f32,at {offset:g}", "numkong-py", record)
        if "peers" not in parts:
            return
        for peer in ("flash-maxsim", "torch [N, M, 3]") if "chamfer" in parts else ():
            write(
                file, f"chamfer,{CLOUDS[0]}x{CLOUDS[0]},d3,f32,at 0", peer, in_own_process("chamfer", peer, CLOUDS[0])
            )
        for shape in MAXSIM if "maxsim" in parts else ():
            if shapes and not any(name_of(shape).startswith(one) for one in shapes):
                continue
            for peer in ("flash-maxsim", "late-interaction-kernels", "torch"):
                write(file, f"grad,{name_of(shape)}", peer, in_own_process("maxsim", peer, *shape))


if __name__ == "__main__":
    if sys.argv[1] == "--peer":
        kind, peer, *numbers = sys.argv[2:]
        values = tuple(map(int, numbers))
        print(json.dumps(maxsim_peer(peer, values) if kind == "maxsim" else chamfer_peer(peer, *values)))
    else:
        main(sys.argv[1], sys.argv[2:])
