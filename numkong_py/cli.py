"""The command line: machine report, packing, inspection, scoring, search and the demo."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from .arrays import Collection, collection
from .backends import backends
from .cpu import METRICS, compiled_capabilities, detected_capabilities, enabled_capabilities
from .dtypes import SCORED
from .errors import CorruptFile, InvalidArgument, NumKongError
from .ops import REDUCTIONS, maxsim, topk
from .packed import PackedTensor, open_file, pack
from .storage import Stored, is_packed, read, write_aside

__all__ = ["main"]

LIBRARIES = (
    "numpy",
    "ml_dtypes",
    "cffi",
    "jax",
    "jaxlib",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "torch",
    "dask",
    "safetensors",
    "xxhash",
)
RAGGED_KEYS = ("offsets", "lengths", "mask")  # names of the arrays in a file that say how the tokens are grouped
BLOCKS = 100  # steps of a progress bar


# ------------------------------------------------------------------------------------- files


def _load_arrays(path: Path) -> dict[str, Any]:
    """Arrays of a .npy (memory-mapped), .npz or .safetensors file, by name, in the file's order."""
    if path.suffix == ".npy":
        return {"x": np.load(path, mmap_mode="r", allow_pickle=False)}
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in tqdm(file.files, desc="reading", unit="array", disable=None)}
    if path.suffix == ".safetensors":
        try:
            from safetensors.numpy import load_file
        except ImportError as error:
            raise InvalidArgument(f"{path}: needs safetensors; pip install 'numkong-py[safetensors]'") from error
        try:
            return load_file(path)
        except Exception as error:  # its own exception derives from nothing narrower
            raise CorruptFile(f"{path}: {error}") from error
    raise InvalidArgument(f"{path}: unknown kind of file; wanted .npy, .npz, .safetensors or a file made by `pack`")


def _as_tokens(array: np.ndarray, dtype: str | None) -> np.ndarray:
    """NumPy saves bfloat16 as nameless 2-byte elements; --dtype bf16 says what they are."""
    return array.view(np.uint16) if dtype is not None and array.dtype == np.dtype("V2") else array


def _read_collection(path: Path, dtype: str | None) -> Collection:
    if is_packed(path):
        return read(path).collection()
    try:
        arrays = _load_arrays(path)
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CorruptFile(f"{path}: {error}") from error
    extras = {name: arrays.pop(name) for name in RAGGED_KEYS if name in arrays}
    found = [_as_tokens(array, dtype) for array in arrays.values()]
    if extras and len(found) != 1:
        raise InvalidArgument(f"{path}: {next(iter(extras))} beside {len(found)} arrays, wanted one array of tokens")
    try:
        return collection(found[0] if len(found) == 1 else found, **extras, dtype=dtype)
    except NumKongError as error:
        raise type(error)(f"{path}: {error}") from error


def _read_any(path: Path, dtype: str | None) -> PackedTensor | Collection:
    return open_file(path) if is_packed(path) else _read_collection(path, dtype)


# ------------------------------------------------------------------------------------- commands


def _facts(stored: Stored) -> dict[str, Any]:
    lengths = np.diff(stored.offsets)
    return {
        "documents": len(lengths),
        "tokens": len(stored.originals),
        "longest": int(lengths.max(initial=0)),
        "empty": int((lengths == 0).sum()),
        "depth": stored.originals.shape[1],
        "dtype": stored.dtype,
        "precision": "exact",
        "backend": stored.row,
        "device": "cpu",
        "available": stored.unavailable is None,
        "bytes": stored.buffer.nbytes,
        "bytes_per_token": round(stored.buffer.nbytes / max(1, len(stored.originals)), 1),
    }


def _print_facts(facts: dict[str, Any]) -> None:
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def _library_versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _info(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = backends()
    return {
        "numkong_py": sys.modules[__package__].__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "processors": os.cpu_count(),
        "capabilities": {
            "detected": str(detected_capabilities()).split(),
            "compiled": str(compiled_capabilities()).split(),
            "enabled": str(enabled_capabilities()).split(),
        },
        "backends": [
            {
                "name": row.name,
                "device": row.device,
                "dtypes": list(row.dtypes),
                "required": str(row.required).split(),
                "available": row.available,
                "reason": row.reason,
            }
            for row in rows
        ],
        "devices": sorted({row.device for row in rows if row.available}),
        "libraries": _library_versions(),
    }


def _print_info(facts: dict[str, Any]) -> None:
    print(f"numkong_py {facts['numkong_py']}, Python {facts['python']}, {facts['system']} {facts['machine']}")
    print(f"processors: {facts['processors']}; devices: {' '.join(facts['devices'])}")
    for kind, names in facts["capabilities"].items():
        print(f"{kind:<9} {' '.join(names)}")
    print("\nrow          device  types         state")
    for row in facts["backends"]:
        state = "available" if row["available"] else f"no: {row['reason']}"
        print(f"{row['name']:<12} {row['device']:<7} {' '.join(row['dtypes']):<13} {state}")
    print("\n" + ", ".join(f"{name} {version}" for name, version in facts["libraries"].items()))


def _pack(arguments: argparse.Namespace) -> dict[str, Any]:
    found = _read_collection(arguments.input, arguments.dtype)
    started = time.perf_counter()
    packed = pack(found, normalize=arguments.normalize, backend=arguments.backend, check_finite=arguments.check_finite)
    seconds = time.perf_counter() - started
    packed.save(arguments.output)
    return {"output": str(arguments.output), **_facts(read(arguments.output)), "pack_seconds": round(seconds, 6)}


def _inspect(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"input": str(arguments.input), **_facts(read(arguments.input))}


def _verify(arguments: argparse.Namespace) -> dict[str, Any]:
    verify = "full" if arguments.full else "header"
    started = time.perf_counter()
    with tqdm(desc="verifying", unit="B", unit_scale=True, disable=None) as bar:
        stored = read(arguments.input, verify=verify, progress=bar.update)
    seconds = time.perf_counter() - started
    return {"input": str(arguments.input), **_facts(stored), "verified": verify, "seconds": round(seconds, 6)}


def _both(arguments: argparse.Namespace) -> tuple[Any, PackedTensor]:
    """Queries as they are, documents packed, so that they can be scored block by block."""
    queries = _read_any(arguments.queries, arguments.dtype)
    documents = _read_any(arguments.documents, arguments.dtype)
    if isinstance(documents, PackedTensor):
        return queries, documents
    return queries, pack(documents, backend=queries.backend if isinstance(queries, PackedTensor) else None)


def _block(documents: PackedTensor) -> int:
    return max(1, -(-len(documents) // BLOCKS))


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ("metric", "reduction", "threads")}


def _score(arguments: argparse.Namespace) -> dict[str, Any]:
    queries, documents = _both(arguments)
    block = _block(documents)
    parts = []
    with tqdm(total=len(documents), desc="scoring", unit="doc", disable=None) as bar:
        for start in range(0, max(1, len(documents)), block):
            parts.append(maxsim(queries, documents[start : start + block], **_options(arguments)))
            bar.update(len(documents[start : start + block]))
    scores = np.concatenate(parts, axis=-1)
    if arguments.output is not None:
        write_aside(arguments.output, lambda file: np.save(file, scores))
    return {
        "backend": documents.backend,
        "metric": arguments.metric,
        "reduction": arguments.reduction,
        "shape": list(scores.shape),
        "output": None if arguments.output is None else str(arguments.output),
        "scores": scores.tolist() if arguments.output is None else None,
    }


def _print_score(facts: dict[str, Any]) -> None:
    if facts["scores"] is None:
        print(f"wrote scores {facts['shape']} to {facts['output']}")
        return
    for row in np.atleast_2d(np.array(facts["scores"])):
        print(" ".join(f"{score:.9g}" for score in row))


def _search(arguments: argparse.Namespace) -> dict[str, Any]:
    queries, documents = _both(arguments)
    with tqdm(total=len(documents), desc="searching", unit="doc", disable=None) as bar:
        scores, indices = topk(
            queries, documents, arguments.k, block=_block(documents), progress=bar.update, **_options(arguments)
        )
    hits = [
        [{"document": index, "score": score} for index, score in zip(*row) if index >= 0]
        for row in zip(np.atleast_2d(indices).tolist(), np.atleast_2d(scores).tolist())
    ]
    return {"backend": documents.backend, "metric": arguments.metric, "documents": len(documents), "hits": hits}


def _print_search(facts: dict[str, Any]) -> None:
    for number, hits in enumerate(facts["hits"]):
        print(f"query {number}")
        for rank, hit in enumerate(hits, start=1):
            print(f"{rank:>4}. document {hit['document']:<10} {hit['score']:.9g}")


def _demo(arguments: argparse.Namespace) -> Any:
    from . import demo

    report = demo.run(arguments.question, arguments.k, backend=arguments.backend, threads=arguments.threads)
    return report.to_dict() if arguments.json else report


def _print_demo(report: Any) -> None:
    from . import demo

    print(demo.render(report))


# ------------------------------------------------------------------------------------- parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}, wanted at least 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="numkong-py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, run: Callable[..., Any], show: Callable[[Any], None], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="print one JSON object; infinities and NaN are null")
        command.set_defaults(run=run, show=show)
        return command

    def add_inputs(command: argparse.ArgumentParser) -> None:
        command.add_argument("queries", type=Path, help=".npy, .npz, .safetensors or packed")
        command.add_argument("documents", type=Path, help="the same")
        command.add_argument("--dtype", choices=SCORED, help="element type; bf16 for arrays of 16-bit patterns")
        command.add_argument("--metric", choices=list(METRICS), default="dot")
        command.add_argument("--reduction", choices=list(REDUCTIONS), default="sum")
        command.add_argument("--threads", type=_count)

    add("info", _info, _print_info, "what this machine and this build can do, and why not")

    command = add("pack", _pack, _print_facts, "pack token vectors into a file that can be scored as it lies")
    command.add_argument(
        "input", type=Path, help="arrays, grouped by offsets, lengths or mask in the file; or a packed file"
    )
    command.add_argument("-o", "--output", type=Path, required=True)
    command.add_argument("--dtype", choices=SCORED, help="element type; bf16 for arrays of 16-bit patterns")
    command.add_argument("--backend", help="row to force; `info` lists them")
    command.add_argument("--normalize", action="store_true", help="divide every token by its norm")
    command.add_argument("--check-finite", action="store_true", help="refuse NaN and infinities")

    command = add("inspect", _inspect, _print_facts, "what a packed file holds, after checking it")
    command.add_argument("input", type=Path)

    command = add("verify", _verify, _print_facts, "check a packed file: sizes, headers and document offsets")
    command.add_argument("input", type=Path)
    command.add_argument("--full", action="store_true", help="read all of it and check the hash of its contents")

    command = add("score", _score, _print_score, "score every query against every document")
    add_inputs(command)
    command.add_argument("-o", "--output", type=Path, help="write the scores to this .npy file")

    command = add("search", _search, _print_search, "the best documents of every query")
    add_inputs(command)
    command.add_argument("-k", type=_count, default=10)

    command = add("demo", _demo, _print_demo, "answer real questions from a small corpus of real text")
    command.add_argument("question", nargs="?", help="a question of your own (needs the demo extra)")
    command.add_argument("-k", type=_count, default=3)
    command.add_argument("--backend", help="row to force")
    command.add_argument("--threads", type=_count)
    return parser


def _plain(value: Any) -> Any:
    """JSON has no infinities and no NaN: they become null."""
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command: 0 when done, 1 when it failed, 2 for wrong usage.

    Examples
    --------
    >>> main(["inspect", "no-such-file"])
    1
    """
    parsed = _parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *rest: print(
                f"numkong-py {parsed.command}: {message}", file=sys.stderr
            )
            facts = parsed.run(parsed)
        if parsed.json:
            print(json.dumps(_plain(facts)))
        else:
            parsed.show(facts)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (NumKongError, OSError) as error:
        print(f"numkong-py {parsed.command}: {error}", file=sys.stderr)
        return 1
    return 0
