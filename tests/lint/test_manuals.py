"""The manual pages, as they are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

MANUALS = sorted(Path("docs/man").glob("*.rst"))
_WIDEST = 71  # of 80 columns, by the margins of man(1)


def as_read(line: str) -> str:
    """A line of a line block, without its markup."""
    return re.sub(r"\\ |\*|\\(?=.)", "", line.removeprefix("| "))


@pytest.mark.parametrize("file", MANUALS, ids=lambda file: file.name)
def test_a_synopsis_fits_a_terminal(file: Path) -> None:
    found = re.search(r"^SYNOPSIS\n=+\n\n(.*?)\n\n", file.read_text(), re.DOTALL | re.MULTILINE)
    lines = [as_read(line) for line in found[1].splitlines()] if found else []
    assert [line for line in lines if len(line) > _WIDEST] == []
