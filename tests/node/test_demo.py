"""The demo, as the README has it."""

from __future__ import annotations

import re

from lab.command import run_command
from lab.tree import TREE

_TIMEOUT_S = 900.0


def test_what_the_demo_says_is_right() -> None:
    demo = run_command([TREE / "dev", "demo"], check=False, timeout_s=_TIMEOUT_S)
    assert demo.returncode == 0, f"{demo.stdout}\n{demo.stderr}"
    scores = re.findall(r"^(\d+) of (\d+) (.+)$", demo.stdout, re.MULTILINE)
    assert {what for _, _, what in scores} == {
        "answers to where an instance lives are right",
        "instances ran",
        "verdicts are right",
        "states are right",
        "instances came back, or stayed off, as they should",
        "devices were plugged in and used",
        "devices are there after the crash",
        "instance ended with its owner",
    }
    assert all(right == of != "0" for right, of, _ in scores), demo.stdout
