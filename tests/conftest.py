"""What all tests share."""

from __future__ import annotations

from typing import Any

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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that in the end no process waits for another's."""
    from lab.parallel import turn_of

    items.sort(key=lambda item: turn_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes, what shares nodes and guests is done by one of them, in order."""
    from lab.parallel import ByMachine

    return ByMachine(config, log)
