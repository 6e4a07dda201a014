"""Shared set-up: a `rerun:` line under every failure, and hypothesis settings that repeat."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        report.sections.append(("rerun", f"rerun: python -m pytest '{item.nodeid}'"))
    return report
