"""The formula's own modules that a run of the Salt states loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unit.salt_loader import load_sls

FILES = [f"_{file}" for file in ("beacons/brine.py", "modules/brine.py", "states/brine_config.py")]
OTHERS = ["_runners/brine.py", "_states/other.py", "brine/map.py"]


def loaded(folder: Path, *, test: bool) -> tuple[set[str], bool, list[str]]:
    """Apply the state on a minion of a master whose loader looks in a folder.

    Returns the files that were copied, whether modules are loaded anew, and what else was called.
    """
    copied, called = set(), []

    def get_file(url: str, copy: str, **_: Any) -> str:
        Path(copy).parent.mkdir(exist_ok=True)
        Path(copy).write_text(url)
        copied.add(url.removeprefix("salt://"))
        return copy

    functions = {
        "cp.list_master": lambda environment, prefix: [
            file for file in [*FILES, *OTHERS] if environment == "base" and file.startswith(prefix)
        ],
        "cp.cache_file": lambda url, _: url,
        "cp.get_file": get_file,
        "file.file_exists": lambda file: Path(file).exists(),
        "file.get_hash": lambda file: Path(file).read_text() if "//" not in file else file,
        "saltutil.refresh_beacons": lambda: called.append("refresh_beacons"),
    }
    opts = {"test": test, "file_client": "remote", "extension_modules": str(folder)}
    given = {"__sls__": "brine.loaded", "__env__": "base", "__opts__": opts}
    states = load_sls("loaded", __salt__=functions, **given).run()
    (options,) = (one["test.nop"] for one in states.values())
    return copied, {"force_reload_modules": True} in options, called


@pytest.mark.parametrize("tests_first", [False, True])
def test_test_mode_leaves_the_beacons_of_the_minion_as_they_are(
    tmp_path: Path, tests_first: bool
) -> None:
    if tests_first:
        assert loaded(tmp_path, test=True) == ({*FILES[1:]}, True, [])
        assert loaded(tmp_path, test=True) == (set(), False, [])
    left = {FILES[0]} if tests_first else {*FILES}
    assert loaded(tmp_path, test=False) == (left, True, ["refresh_beacons"])
    assert loaded(tmp_path, test=False) == (set(), False, [])
