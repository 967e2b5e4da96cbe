"""Tables on a command's standard output, as wide as the terminal, with colour on a terminal."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import zip_longest

_GAP = "  "
_NARROWEST = 8


class Colour(StrEnum):
    """A colour of a cell; its value is the number in :manpage:`console_codes(4)`."""

    BAD = "31"
    WARNING = "33"
    GOOD = "32"


class Cell(str):
    """A cell of a table that has a colour on a terminal."""

    __slots__ = ("colour",)

    def __new__(cls, text: str, colour: Colour) -> Cell:
        """A cell with a text."""
        cell = super().__new__(cls, text)
        cell.colour = colour
        return cell

    colour: Colour


def terminal_columns() -> int:
    """The width of the terminal, or what ``COLUMNS`` says; 0 if there is neither."""
    try:
        columns = int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size(1).columns
    except (ValueError, OSError):  # no number; no terminal, or closed
        return 0
    return max(columns, 0)


def is_screen() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def print_table(heading: Sequence[str], rows: Iterable[Sequence[str]], *, none: str) -> None:
    """Print a table. Without rows, print the text for that case, unless it is empty.

    On a terminal, a table that is too wide wraps within its columns. A pipe or a file gets a line
    for each row, without colour.
    """
    rows = list(rows)
    if not rows:
        print(*filter(None, [none]), sep="\n", end="\n" if none else "")
        return
    columns = terminal_columns() if is_screen() else 0
    is_coloured = (
        is_screen() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
    print(*table([heading, *rows], columns, is_coloured=is_coloured), sep="\n")


def table(
    rows: Iterable[Sequence[str]], columns: int = 0, *, is_coloured: bool = False
) -> Iterator[str]:
    """The lines of a table; the heading comes first.

    :param columns: of the screen. A wider table wraps within its columns, and words stay whole
        where there is room. 0 makes each column as wide as its widest cell.
    """
    rows = list(rows)
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    room = columns - len(_GAP) * (len(widths) - 1)
    if not columns or sum(widths) <= room:
        for row in rows:
            yield _line(row, row, widths, is_coloured)
        return
    widths = _shrunk(rows, widths, room)
    for row in rows:
        parts = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
        for pieces in zip_longest(*parts, fillvalue=""):
            yield _line(row, pieces, widths, is_coloured)


def _shrunk(rows: Sequence[Sequence[str]], widths: Sequence[int], room: int) -> list[int]:
    """The widths of columns in a room that is too small: at first the headings wrap, then the cells
    between words, the widest column first, and at last words break."""
    heading, *others = (list(map(_longest_word, row)) for row in rows)
    cells = [max(map(len, column)) for column in zip(*rows[1:], strict=True)]
    words = [max(column) for column in zip(heading, *others, strict=True)]
    found = list(widths)
    narrowest = [min(width, _NARROWEST) for width in words]
    for least in (list(map(max, heading, cells)), words, narrowest):
        while sum(found) > room:
            wide = [number for number, width in enumerate(found) if width > least[number]]
            if not wide:
                break
            found[max(wide, key=found.__getitem__)] -= 1
    return found


def _longest_word(cell: str) -> int:
    return max(map(len, cell.split()), default=0)


def _wrapped(cell: str, width: int) -> list[str]:
    if len(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_on_hyphens=False)


def _line(
    row: Sequence[str], pieces: Sequence[str], widths: Sequence[int], is_coloured: bool
) -> str:
    """A line of the screen.

    :param pieces: what it has of each cell of the row.
    """
    padded = []
    for cell, piece, width in zip(row, pieces, widths, strict=True):
        text = str(piece).ljust(width)
        if is_coloured and piece and isinstance(cell, Cell):
            text = f"\x1b[{cell.colour}m{piece}\x1b[0m{text[len(piece) :]}"
        padded.append(text)
    return _GAP.join(padded).rstrip()
