"""A report of the demo as text: ranked passages with the words that decided marked."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from typing import TextIO

from .answers import Hit, Report

WIDTH = 100


def wants_color(stream: TextIO) -> bool:
    """Say if ``stream`` is a terminal whose user has not set ``NO_COLOR`` (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def render(report: Report, *, color: bool | None = None, full: int | None = None) -> str:
    """Lay out a report.

    Parameters
    ----------
    report : Report
        What `run` returned.
    color : bool, optional
        Mark words by bold colour (True) or by brackets (False); by default as standard output can show.
    full : int, optional
        How many passages a question gets in full, the rest by name; by default all for one question, 1 for several.

    Returns
    -------
    str
        Lines without a final line break.
    """
    color = wants_color(sys.stdout) if color is None else color
    full = full if full is not None else (1 if len(report.answers) > 1 else len(report.answers[0].hits))
    bold = (lambda text: f"\x1b[1m{text}\x1b[0m") if color else str
    mark = (lambda text: f"\x1b[1;33m{text}\x1b[0m") if color else "[{}]".format
    lines = []
    for answer in report.answers:
        lines.append(bold(f"? {answer.question}"))
        for hit in answer.hits[:full]:
            lines.append(f"  {hit.rank}. {hit.score:.3f}  {bold(hit.id)}")
            lines.extend(_wrap(marked(hit, mark)))
            lines.append(f"       {_pairs(hit)}")
        rest = answer.hits[full:]
        if rest:
            lines.append("  then " + ", ".join(f"{hit.id} {hit.score:.3f}" for hit in rest))
        lines.append("")
    lines.append(_summary(report))
    return "\n".join(lines)


def marked(hit: Hit, mark: Callable[[str], str]) -> str:
    """Give the passage with ``mark`` around each word that met a word of the question."""
    pieces, at = [], 0
    for match in sorted(hit.matches, key=lambda match: match.start):
        pieces += [hit.text[at : match.start], mark(hit.text[match.start : match.end])]
        at = match.end
    return "".join(pieces) + hit.text[at:]


def _pairs(hit: Hit) -> str:
    return "  ".join(f"{match.asked} ~ {match.met} {match.similarity:.2f}" for match in hit.matches)


def _wrap(text: str) -> list[str]:
    # Escape codes have no width, so lines come out a little short on a terminal; that is all.
    return textwrap.wrap(text, WIDTH, initial_indent=" " * 5, subsequent_indent=" " * 5, break_on_hyphens=False)


def _summary(report: Report) -> str:
    known = [answer.correct for answer in report.answers if answer.correct is not None]
    first = f"; {sum(known)} of {len(known)} have a known answer first" if len(known) > 1 else ""
    pairs = len(report.answers) * report.passages
    questions = f"{len(report.answers)} question{'s' if len(report.answers) > 1 else ''}"
    return (
        f"{report.passages} passages, {report.tokens} {report.dtype} tokens packed by row {report.backend!r} "
        f"in {report.pack_seconds * 1e3:.1f} ms ({report.packed_bytes / 1e6:.1f} MB)\n"
        f"{questions} x {report.passages} passages searched exactly in {report.search_seconds * 1e3:.1f} ms "
        f"({report.search_seconds / pairs * 1e6:.1f} us a pair){first}"
    )
