import io
import sys
import time
from collections.abc import Callable

import pytest

from brine.common.tables import Cell, Colour, print_table, table
from brine.common.times import iso_time, local_time

HEADING = ("NAME", "ADMIN STATE", "WHY")
WHY = "crashed (guest panicked); the watcher starts it again"
ROWS = [HEADING, ("web1", "up", WHY), ("db", "offline", "-")]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def show(columns: int, rows: list[tuple[str, ...]], stream: io.StringIO | None = None) -> str:
        screen = stream or Screen()
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "stdout", screen)
        print_table(rows[0], rows[1:], none="nothing is there")
        return screen.getvalue()

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    return show


def test_a_table_that_fits_has_a_line_for_each_row(shown: Callable[..., str]) -> None:
    lines = shown(80, ROWS).splitlines()
    assert lines == [
        "NAME  ADMIN STATE  WHY",
        "web1  up           crashed (guest panicked); the watcher starts it again",
        "db    offline      -",
    ]


def test_one_that_is_too_wide_wraps_within_its_columns(shown: Callable[..., str]) -> None:
    # The heading gives way first.
    assert shown(67, ROWS).splitlines() == [
        "NAME  ADMIN    WHY",
        "      STATE",
        "web1  up       crashed (guest panicked); the watcher starts it",
        "               again",
        "db    offline  -",
    ]
    for columns in range(30, 80):
        lines = shown(columns, ROWS).splitlines()
        assert max(map(len, lines)) <= columns
        beginning = min(line.index("-") for line in lines if line.startswith("db"))
        assert " ".join(line[beginning:] for line in lines[1:] if line[beginning:]).split() == [
            *(["WHY"] if "WHY" not in lines[0] else []),
            *WHY.split(),
            "-",
        ]


def test_words_break_where_there_is_no_room_for_them(shown: Callable[..., str]) -> None:
    uuid = "5e000000-0000-4000-8000-000000000001"
    lines = shown(40, [("UUID", "PATH"), (uuid, "/dev/vg/disk")]).splitlines()
    assert max(map(len, lines)) <= 40
    assert "".join(line[:26].strip() for line in lines[1:]) == uuid
    assert lines[1].endswith("/dev/vg/disk")


def test_a_pipe_has_whole_lines_without_colour(shown: Callable[..., str]) -> None:
    cell = Cell("running", Colour.GOOD)
    text = shown(10, [("NAME", "STATUS"), ("web1", cell)], io.StringIO())
    assert text == "NAME  STATUS\nweb1  running\n"


def test_colours_are_of_words_and_not_of_the_room_beside_them(
    shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        ("STATUS", "NAME"),
        (Cell("up", Colour.GOOD), "a"),
        (Cell("ERROR_down", Colour.BAD), "b"),
    ]
    assert shown(80, rows).splitlines()[1:] == [
        "\x1b[32mup\x1b[0m          a",
        "\x1b[31mERROR_down\x1b[0m  b",
    ]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown(80, rows)
    monkeypatch.setenv("NO_COLOR", "")
    assert "\x1b" in shown(80, rows)
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown(80, rows)


def test_a_wrapped_cell_keeps_its_colour(shown: Callable[..., str]) -> None:
    rows = [("STATUS", "N"), (Cell("running now (paused)", Colour.GOOD), "x")]
    assert shown(16, rows).splitlines()[1:] == [
        "\x1b[32mrunning now\x1b[0m    x",
        "\x1b[32m(paused)\x1b[0m",
    ]


def test_without_rows(shown: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(80, [HEADING]) == "nothing is there\n"
    print_table(HEADING, [], none="")
    assert capsys.readouterr().out == ""


def test_the_width_of_a_pipe_is_no_limit() -> None:
    assert list(table(ROWS))[1].endswith(WHY)


def test_times_are_the_nodes_for_people_and_utc_for_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert local_time(1700000000) == "2023-11-14 23:13:20+01:00"
        assert local_time(1690000000) == "2023-07-22 06:26:40+02:00"
    finally:
        monkeypatch.undo()
        time.tzset()
    assert iso_time(1700000000.9) == "2023-11-14T22:13:20+00:00"
