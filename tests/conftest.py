"""Options and hooks of all tests."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any

import hypothesis
import pytest
from _pytest.runner import runtestprotocol

from brine.common.journal import JournalHandler
from lab.errors import LabError
from lab.long_runs import MARKERS, for_long_runs
from lab.machine import Machine
from lab.node import Node
from lab.signals import give_commands_default_signals, unwind_when_told_to_end
from lab.xen_node import XenNode

_SHOWN_LINES = 60
_LONG_RUN_S = 120
_SLOWEST_FILES = 12
_SLOWEST_TESTS = 30
_SHOWN_S = 6

_QEMU_FAULT = "iotlb_to_section: Assertion"
"""QEMU's abort when its emulated processor reads its own map of the memory while another thread
replaces that. It comes once in many thousands of devices that are plugged in or out, on a loaded
machine, and no option avoids it."""


@pytest.fixture(autouse=True)
def no_handler_of_logs_stays() -> Iterator[None]:
    """A command that a test runs in this process sends its logs to the stderr of that test."""
    yield
    handlers = logging.getLogger().handlers
    handlers[:] = [
        one for one in handlers if type(one) not in (logging.StreamHandler, JournalHandler)
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that ``./dev test --long`` hands over."""
    parser.addoption(
        "--long", action="store_true", help="also the long tests, and each test on both releases"
    )


def pytest_configure(config: pytest.Config) -> None:
    """A test run that is told to end takes its nodes and guests with it."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    unwind_when_told_to_end()
    give_commands_default_signals()
    # No test is about time, and a machine may be slow.
    hypothesis.settings.register_profile(
        "brine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("brine")


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A test that QEMU's own fault has ended is done once more, with new nodes and guests."""
    if not isinstance(item, pytest.Function):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if any(_QEMU_FAULT in report.longreprtext for report in reports):
        item.warn(pytest.PytestWarning(f"done once more: {_QEMU_FAULT}"))
        item.session._setupstate.teardown_exact(None)
        item._initrequest()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, None]:
    """A test that failed on a node shows what the node's journal had last."""
    report = (yield).get_result()
    if call.when == "call" and report.failed:
        for name, machine in getattr(item, "funcargs", {}).items():
            if isinstance(machine, Node | XenNode):
                with suppress(LabError):
                    report.sections.append((f"the journal of {name}", _last_said(machine)))


def _last_said(machine: Machine) -> str:
    options = ["--no-pager", f"--lines={_SHOWN_LINES}", "--output=short-monotonic"]
    return machine.run(["journalctl", *options], check=False).stdout


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest tests come first, so that in the end no process waits for another's."""
    from lab.parallel import turn_of

    if not config.getoption("--long"):
        left_out = for_long_runs(items)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    items.sort(key=lambda item: turn_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes, what shares nodes and guests is done by one of them, in order."""
    from lab.parallel import ByMachine

    return ByMachine(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """After a long run: the kinds, the files and the tests that took most of its time."""
    tests: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                tests[report.nodeid] += report.duration
    if sum(tests.values()) < _LONG_RUN_S:
        return
    files, kinds = defaultdict[str, float](float), defaultdict[str, float](float)
    for test, taken in tests.items():
        file = test.partition("::")[0]
        files[file] += taken
        kinds[file.rpartition("/")[0]] += taken
    terminalreporter.section("where the time went, in minutes of one process")
    for taken_by, shown in ((kinds, len(kinds)), (files, _SLOWEST_FILES), (tests, _SLOWEST_TESTS)):
        rows = [(name, taken) for name, taken in taken_by.items() if taken >= _SHOWN_S]
        for name, taken in sorted(rows, key=lambda row: -row[1])[:shown]:
            terminalreporter.write_line(f"{taken / 60:6.1f}  {name}")
