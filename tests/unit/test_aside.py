"""Other names for what can't be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from brine.common.files import put_aside, second_name


def test_nothing_that_is_kept_gives_way(tmp_path: Path) -> None:
    file, aside = tmp_path / "web1.json", tmp_path / "web1.damaged"
    for number in range(1, 101):
        file.write_text(str(number))
        name = put_aside(file, aside)
        assert name.name == ("web1.damaged" if number == 1 else f"web1.damaged-{number}")
        assert (name.read_text(), file.exists()) == (str(number), False)
    file.write_text("one too many")
    with pytest.raises(FileExistsError, match="too many are kept aside"):
        put_aside(file, aside)
    assert file.read_text() == "one too many"


def test_one_that_has_the_name_already_gets_no_other(tmp_path: Path) -> None:
    """Of a process that was killed half-way."""
    file, aside = tmp_path / "web1.json", tmp_path / "web1.damaged"
    file.write_text("{")
    assert second_name(file, aside) == second_name(file, aside) == aside
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("leads_to", ["nothing", "file"])
def test_a_link_is_kept_as_one(tmp_path: Path, leads_to: str) -> None:
    (tmp_path / "file").write_text("other")
    link, aside = tmp_path / "web1.json", tmp_path / "web1.damaged"
    link.symlink_to(tmp_path / leads_to)
    assert put_aside(link, aside).readlink() == tmp_path / leads_to
    assert (tmp_path / "file").read_text() == "other"
