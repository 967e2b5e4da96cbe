"""The demo's report: it must tell when something is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from demo.endings import Ending
from demo.report import Seen, scores, table


def ending(verdict: str = "", cause: str = "", status: str = "running", why: str = "") -> Ending:
    return Ending("web1", "something", verdict, cause, status, why)


KILLED = ending("crash", "eof", "ERROR_down", "by signal 9")
REBOOTED = ending()

CRASH = {"BRINE_VERDICT": "crash", "BRINE_CAUSE": "eof"}
DOWN = {"status": "ERROR_down", "why": "it should be up but is down: QEMU was ended by signal 9"}
RUNNING = {"status": "running", "why": ""}


@pytest.mark.parametrize(
    ("expected", "record", "listed"),
    [
        (KILLED, CRASH, DOWN),
        (REBOOTED, {}, RUNNING),
    ],
)
def test_what_is_as_expected_is_right(
    expected: Ending, record: dict[str, Any], listed: dict[str, Any]
) -> None:
    seen = [Seen(expected, record, listed)]
    said = [str(score) for score in scores(seen)]
    assert said == ["1 of 1 verdicts are right", "1 of 1 states are right"]
    assert table(seen).endswith("right")


@pytest.mark.parametrize(
    ("expected", "record", "listed", "right"),
    [
        (KILLED, {}, DOWN, [0, 1]),
        (KILLED, {**CRASH, "BRINE_VERDICT": "user"}, DOWN, [0, 1]),
        (KILLED, {**CRASH, "BRINE_CAUSE": "guest-panic"}, DOWN, [0, 1]),
        (KILLED, CRASH, RUNNING, [1, 0]),
        (KILLED, CRASH, {**DOWN, "why": "it should be up but is down: it was stopped"}, [1, 0]),
        (KILLED, CRASH, {}, [1, 0]),
        (REBOOTED, CRASH, RUNNING, [0, 1]),
        (REBOOTED, {}, {**RUNNING, "why": "it runs, but should be down"}, [1, 0]),
    ],
)
def test_what_is_not_is_told(
    expected: Ending, record: dict[str, Any], listed: dict[str, Any], right: list[int]
) -> None:
    seen = [Seen(expected, record, listed)]
    assert [score.right for score in scores(seen)] == right
    assert f"WRONG: {expected.verdict or expected.status}" in table(seen)
