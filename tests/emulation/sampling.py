"""Pytest plugin of the emulated runs: ``--row NAME`` keeps one row's tests, ``--every N`` one in N of big families.

Models are slow, and a family of hundreds of dealt cases (test_same_bits_as_the_reference) covers every pair of its axes
several times over; a family of up to a hundred runs whole.
"""

from __future__ import annotations

from collections import Counter

import pytest

BIG_FAMILY = 100


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("emulation")
    group.addoption("--row", required=True, help="keep the tests whose parameter `row` is this")
    group.addoption("--every", type=int, default=1, help="keep one in this many of a family of over 100 tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    row, every = config.getoption("row"), config.getoption("every")
    of_row = [item for item in items if getattr(item, "callspec", None) and item.callspec.params.get("row") == row]
    sizes, seen = Counter(family(item) for item in of_row), Counter()
    kept = []
    for item in of_row:
        seen[family(item)] += 1
        if sizes[family(item)] <= BIG_FAMILY or seen[family(item)] % every == 0:
            kept.append(item)
    items[:] = kept


def family(item: pytest.Item) -> str:
    """Name of the test function that an item is a case of."""
    return getattr(item, "originalname", None) or item.name
