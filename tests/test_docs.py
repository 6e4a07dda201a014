"""README and docs keep up with the code: the table of rows, the links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import numkong_py as nk

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_table_lists_every_row_with_its_types() -> None:
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|")) for line in README.splitlines() if line[:2] == "| "
    ]
    table = {name: types for name, _, *types in rows if name != "row"}
    expected = {row.name: ["yes" if t in row.dtypes else "-" for t in ("bf16", "f16", "f32")] for row in nk.backends()}
    assert list(table) == list(expected)
    assert table == expected


@pytest.mark.parametrize("document", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(document: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text())
    missing = [link for link in links if not ((ROOT / document).parent / link).exists()]
    assert not missing
