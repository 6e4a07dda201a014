"""The command line: machine report, files, corpora, scoring, search, what packings lose, and the demo."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..cpu import METRICS
from ..dtypes import SCORED
from ..errors import NumKongError
from ..ops import REDUCTIONS
from ..packed import PRECISIONS
from .files import (
    print_facts,
    run_append,
    run_compact,
    run_delete,
    run_export,
    run_inspect,
    run_pack,
    run_verify,
)
from .machine import print_demo, print_info, run_demo, run_info
from .report import print_report, run_report
from .scoring import print_score, print_search, run_score, run_search

__all__ = ["main"]


# ------------------------------------------------------------------------------------- parser


LINES = 'JSON lines {"vectors": [[...], ...], ...}'


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

    def add_dtype(command: argparse.ArgumentParser) -> None:
        command.add_argument("--dtype", choices=SCORED, help="element type; bf16 for arrays of 16-bit patterns")

    def add_corpus(command: argparse.ArgumentParser) -> None:
        command.add_argument("corpus", type=Path, help="its folder")
        command.add_argument("--wait", type=float, default=0.0, help="seconds to wait for another writer")

    def add_inputs(command: argparse.ArgumentParser, documents: str) -> None:
        command.add_argument("queries", type=Path, help=f".npy, .npz, .safetensors, packed, or {LINES} (- or .jsonl)")
        command.add_argument("documents", type=Path, help=documents)
        add_scoring(command)

    def add_scoring(command: argparse.ArgumentParser) -> None:
        add_dtype(command)
        command.add_argument("--metric", choices=list(METRICS), default="dot")
        command.add_argument("--reduction", choices=list(REDUCTIONS), default="sum")
        command.add_argument("--threads", type=_count)

    add("info", run_info, print_info, "what this machine and this build can do, and why not")

    command = add("pack", run_pack, print_facts, "pack token vectors into a file that can be scored as it lies")
    command.add_argument(
        "input", type=Path, help="arrays, grouped by offsets, lengths or mask in the file; packed; or a folder of these"
    )
    command.add_argument("-o", "--output", type=Path, required=True)
    add_dtype(command)
    command.add_argument("--backend", help="row to force; `info` lists them")
    command.add_argument(
        "--precision", choices=PRECISIONS[:-1], default="exact", help="others keep codes and no vectors"
    )
    command.add_argument("--normalize", action="store_true", help="divide every token by its norm")
    command.add_argument("--check-finite", action="store_true", help="refuse NaN and infinities")

    command = add("inspect", run_inspect, print_facts, "what a packed file or a corpus holds, after checking it")
    command.add_argument("input", type=Path)

    command = add(
        "verify", run_verify, print_facts, "check a packed file or a corpus: sizes, headers, document offsets"
    )
    command.add_argument("input", type=Path)
    command.add_argument("--full", action="store_true", help="read all of it and check the hashes of its contents")

    command = add(
        "export", run_export, print_facts, "write the vectors of a packed file or a corpus for other programs"
    )
    command.add_argument("input", type=Path)
    command.add_argument("-o", "--output", type=Path, required=True, help=".npz or .safetensors")
    command.add_argument("--as-list", action="store_true", help="one array a document")

    command = add("append", run_append, print_facts, "add documents to a corpus; the first time makes it")
    add_corpus(command)
    command.add_argument("input", type=Path, nargs="+", help=f"files as for `pack`, folders of them, or {LINES}")
    command.add_argument("--ids", type=Path, help="file with an id a line; default: of the files, else numbers")
    command.add_argument("--metadata", type=Path, help="JSON lines, an object of columns for every document")
    add_dtype(command)
    command.add_argument("--normalize", action="store_true", help="divide every token by its norm")

    command = add("delete", run_delete, print_facts, "remove documents from a corpus by id")
    add_corpus(command)
    command.add_argument("id", nargs="*")
    command.add_argument("--ids", type=Path, help="file with an id a line, or -")
    command.add_argument("--ignore-missing", action="store_true", help="pass over ids that no document has")

    command = add("compact", run_compact, print_facts, "take back the space of deleted documents and small files")
    add_corpus(command)

    command = add("score", run_score, print_score, "score every query against every document")
    add_inputs(command, ".npy, .npz, .safetensors or packed")
    command.add_argument("-o", "--output", type=Path, help="write the scores to this .npy file")

    command = add("search", run_search, print_search, "the best documents of every query")
    add_inputs(command, "a corpus, or a file like those of the queries")
    command.add_argument("-k", type=_count, default=10)
    command.add_argument(
        "--candidates", type=Path, help="rerank only these: JSON lines, a list of ids for every query; or .npy"
    )
    command.add_argument("--include", type=Path, help="file with an id a line: look only among these")
    command.add_argument("--exclude", type=Path, help="file with an id a line: leave these out")
    command.add_argument("--ignore-missing", action="store_true", help="pass over ids that no document has")
    command.add_argument(
        "--min-mean-score", type=float, help="leave out hits with less per query token (angular: more)"
    )
    command.add_argument("--block", type=_count, help="documents to score at a time")
    command.add_argument("--fields", action="store_true", help="show the metadata of every hit")
    command.add_argument("--alignment", action="store_true", help="say which document token each query token matched")
    command.add_argument("--lines", action="store_true", help="one JSON object a query, as they come in")

    command = add("report", run_report, print_report, "what the scores of an approximate packing lose")
    command.add_argument("packed", type=Path, help="made by `pack --precision`")
    command.add_argument(
        "documents", type=Path, help="the vectors that it was packed from, or an exact packing of them"
    )
    command.add_argument("queries", type=Path)
    add_scoring(command)
    command.add_argument("-k", type=_count, default=20)
    command.add_argument("--relevance", type=Path, help=".npy, a gain for every query and document: adds nDCG")
    command.add_argument("--plot", type=Path, help="draw scores and errors to this .png, .svg or .pdf")

    command = add("demo", run_demo, print_demo, "answer real questions from a small corpus of real text")
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


def _show(facts: Any, parsed: argparse.Namespace) -> None:
    if isinstance(facts, Iterator):
        for line in facts:
            print(json.dumps(_plain(line)), flush=True)
    elif parsed.json:
        print(json.dumps(_plain(facts)))
    else:
        parsed.show(facts)


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
            _show(parsed.run(parsed), parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (NumKongError, OSError) as error:
        print(f"numkong-py {parsed.command}: {error}", file=sys.stderr)
        return 1
    return 0
