"""Pytest plugin of the emulated runs: ``--row NAME`` keeps one row's tests, ``--every N`` one in N of big families.

Models are slow, and a family of hundreds of dealt cases (test_same_bits_as_the_reference) covers every pair of its axes
several times over; a family of up to a hundred runs whole. An emulated processor is slower still, and with it NumPy:
``--at-most N`` keeps no more of any family, spread evenly, and eight times as many of a big one.
"""

from __future__ import annotations

from collections import Counter

import pytest

BIG_FAMILY = 100


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("emulation")
    group.addoption("--row", required=True, help="keep the tests whose parameter `row` is this")
    group.addoption("--every", type=int, default=1, help="keep one in this many of a family of over 100 tests")
    group.addoption("--at-most", type=int, help="keep no more tests of a family than this (8 times that if over 100)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    row, every, most = config.getoption("row"), config.getoption("every"), config.getoption("at_most")
    of_row = [item for item in items if getattr(item, "callspec", None) and item.callspec.params.get("row") == row]
    sizes, seen = Counter(family(item) for item in of_row), Counter()
    kept = []
    for item in of_row:
        size, number = sizes[family(item)], seen[family(item)]
        seen[family(item)] += 1
        if most is not None:
            wanted = min(size, most * 8 if size > BIG_FAMILY else most)
            keep = (number + 1) * wanted // size > number * wanted // size
        else:
            keep = size <= BIG_FAMILY or (number + 1) % every == 0
        if keep:
            kept.append(item)
    items[:] = kept


def family(item: pytest.Item) -> str:
    """Name of the test function that an item is a case of."""
    return getattr(item, "originalname", None) or item.name
