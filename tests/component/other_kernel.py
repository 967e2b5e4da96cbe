"""Tests that are done on Debian's own kernel, and told of as if they had been done here.

A test with the mark `needs_vlans` is done there where the kernel that runs has no VLANs on bridges,
and one with `needs_device_mapper` where it maps no devices; one with the mark `both_kernels`, here
and there, but with the mark `little_of_kernels` there in a long run alone. All that were chosen
share one run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonpointer
import pytest

from component.namespaces import can_filter_vlans
from lab.command import CommandError
from lab.debian_kernel import on_debian_kernel, run_on_debian_kernel
from lab.errors import LabError
from lab.guest import QEMU_FILES
from lab.guest_image import guest_image

MARKS = {
    "needs_vlans": "it is done on Debian's kernel if the one that runs has no VLANs on bridges",
    "needs_device_mapper": "it is done on Debian's kernel if the one that runs maps no devices",
    "both_kernels": "it is done on Debian's kernel, too",
    "little_of_kernels": "what it shows is Brine's work, and little of the kernel's",
}
_TREE = Path(__file__).parents[2]
_PROGRAMS = ["qemu-system-x86_64", "nsenter", "mount", "mkdir", "bash", "setpriv", "losetup"]
_PROGRAMS += ["lvm", "dmsetup", "qemu-img", "qemu-io", "mke2fs", "e2fsck", "debugfs", "umount"]
_PROGRAMS += ["cat", "mv"]  # of the scripted systemctl
# What is left out was left out before: the tests are named.
_PYTEST = ["-m", "pytest", "-q", "--color=no", "-p", "no:hypothesispytest", "--long"]
# All is in memory there.
_PYTEST += ["-o", "tmp_path_retention_policy=none"]
_TOLD = "lab: outcome "
_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class _Outcome:
    """The outcome of one phase of a test: `passed`, `failed`, `error` or `skipped`, and why."""

    test: str
    outcome: str
    text: str


class _Run:
    """One run of tests on Debian's kernel, done when the first outcome is asked for."""

    def __init__(self) -> None:
        self.tests: list[str] = []
        self._outcomes: dict[str, list[_Outcome]] | None = None
        self._said = ""

    def outcomes(self, test: str) -> list[_Outcome]:
        if self._outcomes is None:
            self._outcomes = defaultdict(list)
            try:
                self._said = _pytest_there(self.tests)
            except LabError as error:
                self._said = str(error)  # of each test nothing is known
            for outcome in _read(self._said):
                self._outcomes[outcome.test].append(outcome)
        if self._outcomes[test]:
            return self._outcomes[test]
        said, self._said = self._said, "the first such test has what was said"
        return [_Outcome(test, "missing", said)]


class DoneThere(pytest.Item):
    """A test that is done on Debian's kernel; it is chosen by the name that it has here."""

    def __init__(self, *, run: _Run, there: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._run = run
        self._there = there
        run.tests.append(there)

    def runtest(self) -> None:
        outcomes = self._run.outcomes(self._there)
        # After a test was skipped, its fixtures' ends may fail.
        for each in sorted(outcomes, key=lambda outcome: outcome.outcome == "skipped"):
            if each.outcome == "skipped":
                pytest.skip(each.text)
            if each.outcome != "passed":
                pytest.fail(f"on Debian's kernel: {each.outcome}\n{each.text}", pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


def replace(items: list[pytest.Item], *, is_long: bool) -> None:
    """Put tests that are done there in the place of those that cannot be done here, or beside.

    :param is_long: whether a long run does also those there that show little more there.
    """
    vlans = [item for item in items if item.get_closest_marker("needs_vlans")]
    mapped = [item for item in items if item.get_closest_marker("needs_device_mapper")]
    double = [
        item
        for item in items
        if item.get_closest_marker("both_kernels")
        and (is_long or not item.get_closest_marker("little_of_kernels"))
    ]
    if os.geteuid() != 0 or on_debian_kernel() or not (vlans or mapped or double):
        return
    if vlans and can_filter_vlans():
        vlans = []
    if mapped and has_device_mapper():
        mapped = []
    needy = vlans + mapped
    if not shutil.which("apt-get"):
        for item in needy:
            item.add_marker(pytest.mark.skip("the kernel lacks it, and no apt for Debian's kernel"))
        return
    run = _Run()
    items[:] = _replaced(items, run, needy, double)


def has_device_mapper() -> bool:
    """Whether this machine's kernel maps devices."""
    return "device-mapper" in Path("/proc/misc").read_text()


def _replaced(
    items: Iterable[pytest.Item], run: _Run, needy: list[pytest.Item], double: list[pytest.Item]
) -> Iterator[pytest.Item]:
    for item in items:
        if item not in needy:
            yield item
        if item in needy or item in double:
            assert item.parent
            name = f"{item.name}[Debian's kernel]"
            yield DoneThere.from_parent(item.parent, name=name, run=run, there=item.nodeid)


def tell(reporter: pytest.TerminalReporter) -> None:
    """Write down what came of each test, for the process that has them done there."""
    for outcome, reports in reporter.stats.items():
        for report in reports:
            # Those without an outcome are of what went well before and after a test.
            if outcome and isinstance(report, pytest.TestReport):
                reason = report.longrepr
                text = reason[2] if isinstance(reason, tuple) else report.longreprtext
                parts = (text, report.capstdout, report.capstderr)
                told = [report.nodeid, outcome, "\n".join(filter(None, parts))]
                reporter.write_line(f"{_TOLD}{json.dumps(told)}")


def _read(said: str) -> Iterator[_Outcome]:
    for line in said.splitlines():
        if line.startswith(_TOLD):
            yield _Outcome(*json.loads(line.removeprefix(_TOLD)))


def _pytest_there(tests: Iterable[str]) -> str:
    """Run these tests on Debian's kernel; return what pytest wrote."""
    project = _TREE / "pyproject.toml"
    paths = [
        _TREE / "pkgs",
        _TREE / "tests",
        _TREE / "lab",
        project,
        guest_image().folder,
        *QEMU_FILES,
    ]
    chosen = [f"{_TREE}/{test}" for test in tests]
    try:
        return run_on_debian_kernel(
            [*_PYTEST, "-c", project, *chosen],
            paths=[*paths, Path("/etc/os-release"), Path(jsonpointer.__file__)],
            programs=_PROGRAMS,
            timeout_s=_TIMEOUT_S,
        )
    except CommandError as error:
        if error.returncode != 1:  # pytest's, if tests failed
            raise
        return error.stdout
