"""Entry points, as installers write them."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from brine.common.cli import EntryPoint, entry_points

_TEXT = """\
[console_scripts]
one = a.b:main

[brine.commands]
# a comment
nic = brine.hotplug.cli:NIC
tap=brine.hotplug.cli:TAP [extra]
"""


def test_a_groups_entries_are_found_in_whatever_kind_of_metadata(tmp_path: Path) -> None:
    for number, kind in enumerate(("dist-info", "egg-info")):
        folder = tmp_path / f"{number}" / f"brine_{number}-1.{kind}"
        folder.mkdir(parents=True)
        (folder / "entry_points.txt").write_text(_TEXT.replace("nic =", f"nic{number} ="))
    (tmp_path / "0/other-1.dist-info").mkdir()
    (tmp_path / "0/odd-1.dist-info").mkdir()
    (tmp_path / "0/odd-1.dist-info/entry_points.txt").write_bytes(b"\xff")
    path = [str(tmp_path / "0"), str(tmp_path / "1"), str(tmp_path / "missing")]
    found = entry_points("brine.commands", path)
    assert found == [
        EntryPoint("nic0", "brine.hotplug.cli:NIC"),
        EntryPoint("tap", "brine.hotplug.cli:TAP"),
        EntryPoint("nic1", "brine.hotplug.cli:NIC"),
    ]
    assert entry_points("nobody's", path) == []


@pytest.mark.parametrize("group", ["pytest11", "brine.commands"])
def test_it_finds_what_the_standard_library_finds(group: str) -> None:
    theirs = {
        (one.name, one.value.partition(" [")[0]) for one in metadata.entry_points(group=group)
    }
    assert {(one.name, one.value) for one in entry_points(group)} == theirs


def test_an_entry_is_loaded() -> None:
    assert EntryPoint("join", "os.path:join").load() is __import__("os").path.join
    with pytest.raises(ImportError):
        EntryPoint("x", "no.such.module:x").load()
