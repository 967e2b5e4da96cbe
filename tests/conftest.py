"""What all tests share."""

from __future__ import annotations

import hypothesis
import pytest

from lab.signals import unwind_when_told_to_end


def pytest_configure() -> None:
    """A test run that is told to end takes its nodes and guests with it."""
    unwind_when_told_to_end()
    # No test is about time, and a machine may be slow.
    hypothesis.settings.register_profile(
        "brine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("brine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares nodes and guests stays in one process, and in order."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        release = callspec.params.get("release", "all") if callspec else "all"
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{release}"))
