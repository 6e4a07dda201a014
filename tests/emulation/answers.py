"""Pytest plugin of the emulated runs: the reference's answers are computed once, where NumPy is fast.

``--record FILE`` keeps what `numkong_py.reference` returned to each test, and ``--replay FILE`` gives it to the same
tests of another row in another process. The reference is the same bits on every machine (tests/test_reference.py holds
it against exact arithmetic), and under emulation it would be most of the time.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from numkong_py import reference

FUNCTIONS = ("maxsim", "maxsim_pairs", "maxsim_candidates", "pair_values", "topk")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("emulation")
    group.addoption("--record", type=Path, help="write the reference's answers to this file")
    group.addoption("--replay", type=Path, help="read the reference's answers from this file")


class Answers:
    """Answers by test (without the row in its name) and by the number of the call in it."""

    def __init__(self, row: str, recorded: dict[str, list[Any]] | None) -> None:
        self.row, self.recorded = row, recorded
        self.answers: dict[str, list[Any]] = recorded or {}
        self.test, self.calls, self.nested = "", 0, False

    def begin(self, test: str) -> None:
        """A test is about to call the reference."""
        self.test, self.calls = test.replace(self.row, "*"), 0

    def ask(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Answer a call from the file, or by computing it."""
        if self.nested:
            return function(*arguments, **keywords)
        self.calls += 1
        if self.recorded is not None:
            return self.recorded[self.test][self.calls - 1]
        self.nested = True
        try:
            answer = function(*arguments, **keywords)
        finally:
            self.nested = False
        self.answers.setdefault(self.test, []).append(answer)
        return answer


def pytest_configure(config: pytest.Config) -> None:
    replay, record = config.getoption("replay"), config.getoption("record")
    if not replay and not record:
        return
    recorded = pickle.loads(replay.read_bytes()) if replay else None
    config.answers = Answers(config.getoption("row"), recorded)
    for name in FUNCTIONS:
        setattr(reference, name, functools.partial(config.answers.ask, getattr(reference, name)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    if hasattr(item.config, "answers"):
        item.config.answers.begin(item.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    record = session.config.getoption("record")
    if record:
        record.write_bytes(pickle.dumps(session.config.answers.answers, protocol=5))
