"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table, its columns as wide as their widest cell.

    :param rows: the heading first; all of one length.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
