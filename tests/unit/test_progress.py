"""What a command says while its work takes long."""

from __future__ import annotations

import pytest

from brine.common.progress import ProgressLines, size_text

GIB = 1 << 30


def test_long_work_tells_how_far_it_is_how_fast_and_how_long_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 100.0
    tell = ProgressLines(GIB, lambda: now)

    def at(seconds: float, done: float, text: str = "copying") -> str:
        nonlocal now
        now = 100 + seconds
        tell(done, text)
        return capsys.readouterr().err

    assert at(0, 0.0) == ""
    assert at(1, 0.1) == ""
    assert at(2, 0.125) == "brine: copying: 12 %, 64.0M/s, 14 s left\n"
    assert at(3, 0.2) == ""
    assert at(8, 0.25) == "brine: copying: 25 %, 32.0M/s, 24 s left\n"
    assert at(8000, 0.5) == "brine: copying: 50 %, 65.5K/s, 2 h 13 min left\n"
    assert at(8010, 0.5, "another") == "brine: another: 50 %\n"
    assert at(8020, 0.51, "another") == "brine: another: 51 %, 1.0M/s, 8 min left\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0B"), (1023, "1023B"), (1536, "1.5K"), (100 * GIB, "100G"), (5 << 60, "5.0E")],
)
def test_a_size_is_short(count: int, text: str) -> None:
    assert size_text(count) == text
