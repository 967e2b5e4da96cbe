"""The files of specs: written whole, read with suspicion, one writer at a time."""

from __future__ import annotations

import errno
import grp
import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.common.errors import BrineError
from brine.common.locks import LockedError
from brine.instance import store
from brine.instance.store import DamagedSpecError, InstanceError
from brine.instance.validate import completed
from brine.vm.spec import Spec, parse, to_json


@pytest.fixture(autouse=True)
def folder(own_node: Path) -> Path:
    """Where specs are; it is not there yet."""
    return own_node / "instances"


def saved(name: str = "web1", **keys: Any) -> Spec:
    spec = completed({"name": name, **keys})
    store.save(spec)
    return spec


def test_what_is_saved_is_loaded(folder: Path) -> None:
    spec = saved(vcpus=3, disks=[{"path": "/é"}], nics=[{"link": "br0"}])
    assert store.load("web1") == spec
    written = json.loads((folder / "web1.json").read_text())
    assert written.keys() == to_json(spec).keys() - {"owner", "ignored", "slice", "claim_serial"}
    known = to_json(spec)
    for name in ("name", "unit", "size_mib", "by_hand"):
        del known["disks"][0][name]
    for name in ("by_hand", "filter"):
        del known["nics"][0][name]
    assert written == {key: known[key] for key in written}
    owned = saved(owner={"watchdog_timeout": 9})
    assert store.load("web1") == owned


@pytest.mark.parametrize(
    ("key", "newer"), [("disks", "by_hand"), ("nics", "by_hand"), ("nics", "filter")]
)
def test_the_release_before_reads_a_spec_with_what_it_does_not_know(
    folder: Path, key: str, newer: str
) -> None:
    """It refuses keys that it does not know, unless the file has a newer version."""
    plain = saved(disks=[{"path": "/d"}], nics=[{"link": "br0"}])
    assert json.loads((folder / "web1.json").read_text())["version"] == 1
    data = to_json(plain)
    data[key][0][newer] = True
    store.save(spec := parse(Spec, data))
    assert json.loads((folder / "web1.json").read_text())["version"] == 2
    assert store.load("web1") == spec
    assert store.load("web1").version == 1


def test_members_of_the_group_may_read_it_and_nobody_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = grp.struct_group(("brine", "x", os.getgid(), []))
    monkeypatch.setattr(store, "_GROUP", "brine")
    monkeypatch.setattr(grp, "getgrnam", lambda name: {"brine": entry}[name])
    old_umask = os.umask(0)
    try:
        saved()
    finally:
        os.umask(old_umask)
    status = (folder / "web1.json").stat()
    assert stat.S_IMODE(status.st_mode) == 0o640
    assert status.st_gid == os.getgid()


def test_a_write_that_fails_leaves_what_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = saved()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as faulty:
        faulty.setattr(os, "fsync", fail)
        with pytest.raises(InstanceError, match="web1.json: can't be written: No space left"):
            store.save(replace(spec, vcpus=2))
    assert store.load("web1") == spec
    assert [file.name for file in folder.iterdir()] == ["web1.json"]


def test_all_of_them_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(store.load_all()) == []
    for name in ("web2", "db.example.com", "web1"):
        saved(name)
    (folder / ".web3.json").write_text("{}")  # a name that can't be
    (folder / "web4.json~").write_text("{}")
    (folder / "web5.damaged").write_text("{}")
    names = ["db.example.com", "web1", "web2"]
    assert store.names() == [one.name for one in store.load_all()] == names
    # One that is damaged does not hide the others, nor one that is undefined meanwhile.
    (folder / "web1.json").write_text("{")
    monkeypatch.setattr(store, "names", lambda: ["gone", *names])
    found = list(store.load_all())
    assert [one.name for one in found] == names
    assert isinstance(found[1], DamagedSpecError)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[" * 100_000, ""),
        ("\udcff", "can't decode byte 0xff"),
        ("[]", "must be an object, but is a list"),
        ("{}", "has no name"),
        ('{"name": "web1", "vcpu": 1}', "/vcpu: there is no such key"),
        ('{"name": "web1"}', "lacks UUIDs or MAC addresses"),
    ],
)
def test_what_is_damaged_is_named_with_its_file(folder: Path, content: str, said: str) -> None:
    folder.mkdir()
    file = folder / "web1.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DamagedSpecError) as told:
        store.load("web1")
    text = str(told.value)
    assert text.startswith(f"web1: {file}: ")
    assert said in text
    assert "\n" not in text
    assert told.value.hint == "brine instance define writes it anew, and keeps this one aside"


def test_a_copy_of_another_ones_is_damaged(folder: Path) -> None:
    """Or there would be two of the same UUID."""
    saved("web2")
    (folder / "web1.json").write_bytes((folder / "web2.json").read_bytes())
    with pytest.raises(DamagedSpecError, match="web1.json: is the spec of web2"):
        store.load("web1")


def test_one_whose_file_has_another_name_by_now_has_that_name(folder: Path) -> None:
    """A rename does that first; what is killed then has renamed it."""
    spec = saved("web2")
    store.switch("web2", "web1")
    assert store.load("web1") == replace(spec, name="web1")
    assert store.names() == ["web1"]
    store.save(store.load("web1"))
    assert json.loads((folder / "web1.json").read_text())["name"] == "web1"


@pytest.mark.parametrize("missing", ["uuid", "disks", "nics", "mac"])
def test_a_file_that_was_written_by_hand_needs_all_uuids(folder: Path, missing: str) -> None:
    data = to_json(saved(disks=[{"path": "/a"}], nics=[{"link": "br0"}]))
    if missing == "uuid":
        data["uuid"] = ""
    elif missing == "mac":
        data["nics"][0]["mac"] = ""
    else:
        data[missing][0]["uuid"] = ""
    (folder / "web1.json").write_text(json.dumps(data))
    with pytest.raises(DamagedSpecError, match="lacks UUIDs or MAC addresses"):
        store.load("web1")


def test_a_fifo_holds_nobody_up_and_can_be_replaced(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "web1.json")
    with pytest.raises(DamagedSpecError, match="web1.json: can't be read: Is no regular file"):
        store.load("web1")
    store.keep_aside("web1")
    spec = saved("web1")
    assert store.load("web1") == spec


def test_one_that_is_not_there_says_what_makes_one() -> None:
    with pytest.raises(InstanceError, match="web1: there is no such instance") as told:
        store.load("web1")
    assert "brine instance define" in (told.value.hint or "")


def test_what_can_not_be_read_is_neither_damaged_nor_empty(folder: Path) -> None:
    (folder / "web1.json").mkdir(parents=True)
    with pytest.raises(InstanceError, match="can't be read: Is a directory") as told:
        store.load("web1")
    assert not isinstance(told.value, DamagedSpecError)
    folder.rename(folder.with_name("moved"))
    folder.write_text("")
    with pytest.raises(BrineError, match="instances: can't be read: Not a directory"):
        list(store.load_all())


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "a\n", "é", "x" * 64, "a b", "%i"])
def test_a_name_that_can_not_be_is_refused_everywhere(folder: Path, name: str) -> None:
    for work in (store.spec_file_of, store.load, store.remove):
        with pytest.raises(InstanceError, match="a name "):
            work(name)
    with pytest.raises(InstanceError, match="a name "), store.alone(name):
        pass
    assert not folder.exists()


def test_a_damaged_one_is_kept_beside_the_new_one(folder: Path) -> None:
    folder.mkdir()
    for content, aside in (("{first", "web1.damaged"), ("{second", "web1.damaged-2")):
        (folder / "web1.json").write_text(content)
        # Somebody was killed right after it, and came again.
        assert store.keep_aside("web1") == store.keep_aside("web1") == folder / aside
        spec = saved()
        assert (folder / aside).read_text() == content
        assert store.load("web1") == spec
    assert store.names() == ["web1"]
    for _ in range(2):  # the second time it is gone already
        store.remove("web1")
        assert store.names() == []


def test_one_writer_at_a_time() -> None:
    with store.alone("web1"):
        with pytest.raises(LockedError), store.alone("web1", timeout_s=0.05):
            pass
        with store.alone("web2", timeout_s=0):
            pass
    with store.alone("web1", timeout_s=0):
        pass


@pytest.mark.parametrize(
    ("number", "text", "hint"),
    [
        (errno.EACCES, "Permission denied", "be root"),
        (errno.EROFS, "Read-only file system", None),
    ],
)
def test_a_lock_that_can_not_be_had(
    monkeypatch: pytest.MonkeyPatch, number: int, text: str, hint: str | None
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    # What fails while one is alone is not the lock's fault.
    with pytest.raises(PermissionError, match="other"), store.alone("web1"):
        raise PermissionError(errno.EPERM, "other")
    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(InstanceError, match=f"web1: can't be locked: {text}") as told:
        with store.alone("web1"):
            pass
    assert told.value.hint == hint
