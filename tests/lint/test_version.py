"""All places that have Brine's version have the same one."""

from __future__ import annotations

import re

from lab.tree import TREE
from lab.version import NEWS, RELEASED, places, versions


def test_every_place_repeats_the_changelogs_version() -> None:
    version = versions()[0]
    found = {str(place.file.relative_to(TREE)): place.version for place in places()}
    parts = {f"pkgs/{folder.name}/pyproject.toml" for folder in TREE.glob("pkgs/*")}
    assert found.keys() > {"docs/man/brine.1.rst", "salt/FORMULA", *parts}
    others = {file: other for file, other in found.items() if other != version}
    assert others == {}, "./dev version writes the changelog's version to all places"


def test_the_news_are_of_every_version() -> None:
    told = re.findall(r"^Brine ([0-9][^ ]*), ", NEWS.read_text(), re.MULTILINE)
    assert told == versions()


def test_the_release_before_has_its_commit() -> None:
    assert list(RELEASED) == versions()[1:2]


def test_the_changelog_fits_into_lines_of_80() -> None:
    lines = (TREE / "debian/changelog").read_text().splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith(" -- ")] == []
