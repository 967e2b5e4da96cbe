"""What all tests share."""

from __future__ import annotations

from lab.signals import unwind_on_sigterm


def pytest_configure() -> None:
    """A test run that is told to end takes its nodes and guests with it."""
    unwind_on_sigterm()
