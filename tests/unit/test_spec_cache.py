"""Specs that were checked before: a list takes those of unchanged files, and no others."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.instance import spec_cache, store
from brine.instance.store import DamagedSpecError
from brine.instance.validate import completed
from brine.vm import stored_spec
from brine.vm.spec import Spec, parse

NAMES = [f"vm{number:02}" for number in range(20)]


@pytest.fixture(autouse=True)
def cache(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the cache, of root whoever runs this; all specs are old enough to be kept."""
    monkeypatch.setattr(paths, "SPEC_CACHE_FILE", own_node / "specs.cache")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(spec_cache, "ROOT", os.getuid())
    monkeypatch.setattr(spec_cache, "SETTLED_NS", 0)
    for name in NAMES:
        store.save(
            completed(
                {"name": name, "disks": [{"path": f"/srv/{name}"}], "nics": [{"link": "br0"}]}
            )
        )
    return own_node / "specs.cache"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the specs whose files are read."""
    names: list[str] = []

    def noted(kind: type[Spec], data: Any) -> Spec:
        names.append(data["name"])
        return parse(kind, data)

    monkeypatch.setattr("brine.vm.stored_spec.parse", noted)
    stored_spec._spec_of.cache_clear()
    return names


def memory_of_all() -> dict[str, int]:
    stored_spec._spec_of.cache_clear()  # each list is a process
    return {one.name: one.memory_mib for one in store.load_all() if isinstance(one, Spec)}


def test_the_second_list_reads_no_spec_that_has_not_changed(read: list[str], cache: Path) -> None:
    first = list(store.load_all())
    assert (read, cache.stat().st_mode & 0o777) == (NAMES, 0o600)
    read.clear()
    assert list(store.load_all()) == first
    assert read == []
    assert [store.load(name) for name in NAMES] == first


def test_a_spec_that_changed_is_read_again(read: list[str], own_node: Path) -> None:
    before = memory_of_all()
    store.save(completed({"name": "vm03", "memory_mib": 77}))
    file = own_node / "instances/vm04.json"
    # By hand, in the same inode and of the same size, with the time of the former one.
    times = file.stat()
    text = file.read_text()
    changed = text.replace(f'"memory_mib": {before["vm04"]}', '"memory_mib": 999')
    file.write_text(changed.ljust(len(text)))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    (own_node / "instances/vm05.json").unlink()
    read.clear()
    after = memory_of_all()
    assert read == ["vm03", "vm04"]
    assert (after.pop("vm03"), after.pop("vm04")) == (77, 999)
    assert after.items() <= before.items()
    assert "vm05" not in after


def test_a_spec_that_changed_just_now_is_not_kept(
    read: list[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(spec_cache, "SETTLED_NS", 3600 * 10**9)
    memory_of_all()
    assert not cache.exists()
    # Nor if the clock was set back since.
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    memory_of_all()
    assert not cache.exists()
    assert read == [*NAMES, *NAMES]


def test_a_spec_that_became_damaged_is_told(own_node: Path) -> None:
    memory_of_all()
    (own_node / "instances/vm07.json").write_text("{")
    (fault,) = (one for one in store.load_all() if not isinstance(one, Spec))
    assert isinstance(fault, DamagedSpecError)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80", b"garbage", b"\x80\x04]\x94.", b"cos\nsystem\n(S'touch hostile'\ntR."],
)
def test_a_cache_that_is_none_is_made_anew(
    read: list[str], cache: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    cache.write_bytes(content)
    cache.chmod(0o644)  # as others' files are: nothing is made of its content
    before = memory_of_all()
    assert (read, list(before)) == (NAMES, NAMES)
    assert not (tmp_path / "hostile").exists()
    read.clear()
    memory_of_all()
    assert read == []
    if content == b"garbage":
        cache.write_bytes(content)
        assert list(memory_of_all()) == NAMES


def test_others_files_and_links_are_no_cache(
    read: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_of_all()
    real = cache.rename(cache.with_suffix(".real"))
    cache.symlink_to(real)
    read.clear()
    memory_of_all()
    assert read == NAMES
    assert not cache.is_symlink()  # it was made anew
    monkeypatch.setattr(spec_cache, "ROOT", os.getuid() + 1)
    read.clear()
    memory_of_all()
    assert read == NAMES


def test_another_version_of_brine_begins_anew(
    read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_of_all()
    monkeypatch.setattr(spec_cache, "_CHECKED_BY", (0,))
    read.clear()
    memory_of_all()
    assert read == NAMES


def test_a_copy_of_a_spec_is_judged_each_time(own_node: Path) -> None:
    """Whether a copied file is a spec depends on another file."""
    data = json.loads((own_node / "instances/vm01.json").read_text())
    file = own_node / "instances/copy.json"
    file.write_text(json.dumps(data))
    faults = [one for one in store.load_all() if not isinstance(one, Spec)]
    (own_node / "instances/vm01.json").unlink()
    names = [one.name for one in store.load_all() if isinstance(one, Spec)]
    assert (len(faults), names[0]) == (1, "copy")


def test_other_users_and_small_nodes_have_no_cache(
    cache: Path, own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    memory_of_all()
    assert not cache.exists()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in NAMES[5:]:
        (own_node / f"instances/{name}.json").unlink()
    memory_of_all()
    assert not cache.exists()
