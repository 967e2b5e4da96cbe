"""The demo, as the README has it."""

from __future__ import annotations

import re

import pytest

from lab.command import run_command
from lab.tree import TREE

_TIMEOUT_S = 1500.0


SCORES = {
    "instances run",
    "answers to where an instance lives are right",
    "poweroff is in the cluster's configuration",
    "NIC is used while the VM runs",
    "instance is down as pillar says",
    "nodes are as pillar says",
    "disk has grown while the VM runs",
    "verdicts are right",
    "states are right",
    "NIC is used after a crash",
    "instance ended with its owner",
}
OF_A_FLEET = {
    "node has rebooted",
    "guest was elsewhere, and came home",
    "guest has moved, and was not restarted",
    "nodes know where it lives now",
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param([], SCORES | OF_A_FLEET, id="fleet"),
        pytest.param(["--local"], SCORES, id="local", marks=pytest.mark.long),
    ],
)
def test_what_the_demo_says_is_right(options: list[str], expected: set[str]) -> None:
    demo = run_command([TREE / "dev", "demo", *options], check=False, timeout_s=_TIMEOUT_S)
    assert demo.returncode == 0, f"{demo.stdout}\n{demo.stderr}"
    scores = re.findall(r"^(\d+) of (\d+) (.+)$", demo.stdout, re.MULTILINE)
    assert {what for _, _, what in scores} == expected
    assert all(right == of != "0" for right, of, _ in scores), demo.stdout
