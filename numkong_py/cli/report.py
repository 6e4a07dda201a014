"""The command `report`: what an approximate packing loses, as a table, JSON and a plot."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InvalidArgument, UnsupportedDtype
from ..packed import PackedTensor
from ..report import ErrorReport, error_report, table
from ..storage import write_aside
from .inputs import read_any

__all__ = ["print_report", "run_report"]

FORMATS = (".pdf", ".png", ".svg")
DOTS = 20_000  # of a plot; more make it slow to look at


def run_report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the scores of a packed file with those of the vectors that it was packed from."""
    if arguments.plot is not None:
        _check_plot(arguments.plot)
    packed = read_any(arguments.packed, None)
    if not isinstance(packed, PackedTensor):
        raise UnsupportedDtype(f"{arguments.packed}: not packed; `pack --precision int8` makes such a file")
    report = error_report(
        packed,
        read_any(arguments.documents, arguments.dtype),
        read_any(arguments.queries, arguments.dtype),
        k=arguments.k,
        metric=arguments.metric,
        reduction=arguments.reduction,
        relevance=None if arguments.relevance is None else np.load(arguments.relevance),
        threads=arguments.threads,
    )
    if arguments.plot is not None:
        _plot(report, arguments.plot)
    return {"packed": str(arguments.packed), **report.as_dict()}


def print_report(facts: dict[str, Any]) -> None:
    """Show the table."""
    print(table(facts))


def _check_plot(path: Path) -> None:
    """Raise before anything is scored if the plot could not be drawn."""
    if path.suffix not in FORMATS:
        raise InvalidArgument(f"--plot: {path}, wanted a name that ends in {', '.join(FORMATS)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InvalidArgument(f"--plot: needs matplotlib ({error}); pip install 'numkong-py[report]'") from error


def _plot(report: ErrorReport, path: Path) -> None:
    """Scores against exact scores, and errors against their bounds, which they must not pass."""
    from matplotlib.figure import Figure

    counted = np.flatnonzero(np.isfinite(report.exact_scores).ravel() & np.isfinite(report.bounds).ravel())
    shown = np.random.default_rng(0).choice(counted, min(len(counted), DOTS), replace=False)
    scores, exact, bounds = (array.ravel()[shown] for array in (report.scores, report.exact_scores, report.bounds))
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(exact, scores, ".", markersize=2, rasterized=True)
    left.axline((float(exact.mean()) if len(exact) else 0,) * 2, slope=1, color="black", linewidth=0.6)
    left.set(xlabel="exact score", ylabel=f"{report.precision} score", title=f"Spearman {report.spearman:.6f}")
    right.plot(bounds, np.abs(scores - exact), ".", markersize=2, rasterized=True)
    right.axline((0, 0), slope=1, color="black", linewidth=0.6)
    right.set(xlabel="stated bound", ylabel="error", title=f"{report.max_error_of_bound:.0%} of the bound at most")
    write_aside(path, lambda file: figure.savefig(file, format=path.suffix[1:], dpi=150))
