"""The watcher's rest: how long, until when, and what is no length of time."""

from __future__ import annotations

from pathlib import Path

import pytest

from brine.common.errors import UsageError
from brine.watcher.record import PauseError, parse_duration, pause, paused_until, resume

NOW = 1_800_000_000.0


def test_a_rest_ends_by_itself_or_by_a_word(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "watcher.pause"
    assert paused_until(NOW, file=file) is None
    assert not resume(file=file)
    assert pause(7200, NOW, file=file) == NOW + 7200
    assert file.read_text() == "1800007200\n"  # as Ganeti's watcher has it
    assert paused_until(NOW + 7199, file=file) == NOW + 7200
    assert paused_until(NOW + 7200, file=file) is None
    assert resume(file=file)
    assert paused_until(NOW, file=file) is None


@pytest.mark.parametrize("content", [b"", b"tomorrow", b"\xff", b"1 2", b"inf", b"nan", b"1e20"])
def test_a_file_that_says_nothing_is_an_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "watcher.pause"
    file.write_bytes(content)
    with pytest.raises(PauseError):
        paused_until(NOW, file=file)


@pytest.mark.parametrize("until", [NOW + 367 * 86400, NOW * 1000, 2e11])
def test_a_rest_of_more_than_a_year_is_damage(tmp_path: Path, until: float) -> None:
    file = tmp_path / "watcher.pause"
    file.write_text(f"{until}\n")
    with pytest.raises(PauseError) as caught:
        paused_until(NOW, file=file)
    assert caught.value.hint == "brine watcher resume removes it"
    # The longest that there is stands, also after a clock that was set back a little.
    pause(parse_duration("365d"), NOW, file=file)
    assert paused_until(NOW - 3600, file=file) == NOW + 365 * 86400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("5min", 300), ("2h", 7200), ("3d", 259200), ("1w", 604800)],
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "0h", "-1h", "2 years", "400d", "h", "1e3s", "²h"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(UsageError, match="not a length of time"):
        parse_duration(text)
