"""Disks that are added to, and removed from, an instance whose guest runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from brine.common import operation, paths
from brine.instance import store
from brine.instance.conflicts import refuse_in_use
from brine.instance.disks import disk_commands
from brine.instance.kvm.live_definition import LiveResult, change_live
from brine.instance.kvm.runtime_devices import devices_now, with_last_run
from brine.instance.observe import Oper, look
from brine.instance.registry import define_instance
from brine.instance.store import InstanceError
from brine.instance.validate import completed
from brine.storage.orphans import orphans
from brine.vm.files import InstanceFiles
from brine.vm.runtime_file import Runtime, change_file
from brine.vm.spec import Spec, SpecError, to_json
from component.live_instance import NAME, LiveInstance, brine
from component.test_sized_disks import DATA, MIB, ROOT, files_in, full, small, unit, web1
from lab.guest_devices import wait_disk

__all__ = ["small", "unit"]

pytestmark = [
    pytest.mark.usefixtures("own_node"),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes disks as root; ./dev test runs as root"),
]


@pytest.fixture
def live(unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LiveInstance:
    """An instance with two disks with volumes."""
    made = LiveInstance(tmp_path, monkeypatch)
    define_instance(web1(ROOT, DATA | {"interface": "virtio"}))
    return made


def raw_image(file: Path) -> str:
    file.write_bytes(bytes(MIB))
    return str(file)


def test_what_was_plugged_in_stays_when_another_disk_is_removed(
    live: LiveInstance, tmp_path: Path
) -> None:
    plain = raw_image(tmp_path / "plain.raw")
    with live.running():
        assert brine("disk", "add", NAME, "--path", plain) == 0
        assert brine("disk", "remove", NAME, "data") == 0
    root = live.disk("root")
    assert [one.path for one in with_last_run(store.load(NAME)).disks] == [root.path, plain]


def test_a_declaration_leaves_what_was_added_by_hand_and_an_operators_file_does_not(
    live: LiveInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, file = raw_image(tmp_path / "plain.raw"), tmp_path / "web1.json"

    def defined(*disks: dict[str, Any], declared: bool = True) -> tuple[Any, ...]:
        """Whether the spec has changed; the disks that were plugged in, and those taken out."""
        file.write_text(json.dumps(web1(ROOT, DATA | {"interface": "virtio"}, *disks)))
        capsys.readouterr()
        keep = ["--keep-user-state"] if declared else []
        assert brine("instance", "define", str(file), "--live", "--json", *keep) == 0
        told = json.loads(capsys.readouterr().out)
        names = {one.path: one.name for one in store.load(NAME).disks}
        return told["changed"], *(
            [names.get(one["path"], one["path"]) for one in told[key]]
            for key in ("attached", "detached")
        )

    def by_hand(verb: str) -> dict[str, bool]:
        capsys.readouterr()
        assert brine("disk", verb, NAME, "--json") == 0
        rows = json.loads(capsys.readouterr().out)
        return {one["path"]: one["by_hand"] for one in rows}

    with live.running() as guest:
        assert brine("disk", "add", NAME, "--size", "4M", "--name", "hand") == 0
        assert brine("disk", "add", NAME, "--path", plain) == 0
        paths_of = {name: live.disk(name).path for name in ("root", "data", "hand")}
        flags = {paths_of["root"]: False, paths_of["data"]: False, paths_of["hand"]: True}
        assert by_hand("list") == {**flags, plain: True}
        assert by_hand("status") == flags
        before = {one.uuid: one.slot for one in devices_now(NAME).now.disks}

        assert defined() == (False, [], [])
        more = {"name": "more", "size_mib": 4}
        assert defined(more) == (True, ["more"], [])
        assert defined(more) == (False, [], [])
        now = {one.uuid: one.slot for one in devices_now(NAME).now.disks}
        assert (len(now), before.items() <= now.items()) == (5, True)
        names = [one.name for one in store.load(NAME).disks]
        assert names == ["root", "data", "more", "hand", ""]
        assert wait_disk(guest, live.disk("hand").guest_serial())

        # It is the declaration's from now on, and leaves with it.
        assert defined(more, {"name": "hand", "size_mib": 4}) == (True, [], [])
        assert defined(more) == (True, [], [paths_of["hand"]])

        assert brine("disk", "remove", NAME, plain) == 0
        assert defined(more) == (True, [], [])
        assert defined(more) == (False, [], [])
        assert brine("disk", "add", NAME, "--path", paths_of["hand"]) == 0
        assert defined(more, declared=False) == (True, [], [paths_of["hand"]])
    assert {one.name for one in with_last_run(store.load(NAME)).disks} == {"root", "data", "more"}


def test_a_rollback_that_can_not_be_written_stops_nothing(
    small: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    live = LiveInstance(tmp_path, monkeypatch)
    define_instance(web1({**ROOT, "unit": small}))
    assert brine("disk", "snapshot", NAME, "--name", "one") == 0
    with live.running() as guest:
        capsys.readouterr()
        os.rename(overlay := live.disk("root").path, aside := f"{small}/aside")
        with full(small):
            assert brine("disk", "rollback", NAME, "one", "--force-stop") == 1
        os.rename(aside, overlay)
        assert small in capsys.readouterr().err
        assert guest.run("echo runs") == "runs\n"
        assert look(NAME).state.oper is Oper.RUNNING
    assert operation.pending() == []


def test_a_full_unit_gets_space_without_what_is_lost_being_asked(
    unit: str,
    small: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    os.mkdir(large := f"{unit}/large")
    (paths.ETC_DIR / "storage.toml").write_text(f'directories = ["{large}", "{small}"]\n')
    live = LiveInstance(tmp_path, monkeypatch)
    data = {**DATA, "interface": "virtio", "format": "raw"}
    define_instance(web1({**ROOT, "unit": small}, {**data, "unit": small}))
    with live.running() as guest:
        for name in ("root", "data"):
            wait_disk(guest, live.disk(name).uuid[:20])
        for number, name in enumerate(("one", "two", "three")):
            for device in ("vda", "vdb"):
                guest.run(f"echo {number} | dd of=/dev/{device} bs=512 conv=sync,fsync")
            assert brine("disk", "snapshot", NAME, "--name", name) == 0
        guest.run("dd if=/dev/vda of=/dev/vdb bs=1M count=2 conv=fsync")
        capsys.readouterr()
        with full(small):
            for words in (
                ["snapshot", NAME, "--remove", "two"],
                ["move", NAME, "data", "--to", large],
            ):
                assert brine("disk", *words) == 1
                assert "--discard-snapshots" in capsys.readouterr().err
            words = ["move", NAME, "data", "--to", large, "--discard-snapshots"]
            assert brine("disk", *words) == 0, capsys.readouterr().err
            assert guest.run("head -c2 /dev/vdb") == "2\n"
    moved = live.disk("data")
    assert (moved.unit, moved.backing, moved.format) == (large, None, "raw")
    assert Path(moved.path).read_bytes().startswith(b"2\n\0")
    assert {Path(one).name.partition(".")[0] for one in files_in(small)} == {live.disk("root").uuid}
    with full(small):
        assert brine("disk", "rollback", NAME, "two") == 1
        assert "--discard-newer" in capsys.readouterr().err
        assert brine("disk", "rollback", NAME, "two", "--discard-newer") == 0
        root = live.disk("root")
        assert Path(root.path).name.endswith(".two.qcow2")
        read = ["qemu-io", "-c", "read -v 0 2", root.path]
        done = subprocess.run(read, check=True, capture_output=True, text=True)
        assert done.stdout.startswith("00000000:  31 0a")
    for name in ("two", "one"):
        assert brine("disk", "snapshot", NAME, "--remove", name) == 0
    assert operation.pending() == []
    assert orphans() == []


def test_an_addition_that_was_killed_before_the_guest_had_the_disk_is_completed(
    live: LiveInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = ("disk", "add", NAME, "--size", "4M", "--name", "k")
    with live.running():
        row = {"name": "k", "size_mib": 4}
        define_instance(web1(ROOT, DATA | {"interface": "virtio"}, row))  # all but the plugging
        assert brine(*add, "--unit", "/srv/other") == 1
        assert brine(*add) == 0
        assert brine(*add) == 1
        now = [one.uuid for one in devices_now(NAME).now.disks]
        assert live.disk("k").uuid in now

        def told_to_end(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(disk_commands, "change_live", told_to_end)
        assert brine("disk", "add", NAME, "--size", "4M", "--name", "m") == 130
        assert [one.name for one in store.load(NAME).disks] == ["root", "data", "k"]
        assert orphans() == []


def test_a_disk_that_was_there_stays_whatever_becomes_of_an_addition(
    live: LiveInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = ("disk", "add", NAME, "--size", "4M", "--name", "k")
    with live.running():
        define_instance(web1(ROOT, DATA | {"interface": "virtio"}, {"name": "k", "size_mib": 4}))
        disk = live.disk("k")

        def attaches_nothing(spec: Spec, *_: object, **__: object) -> LiveResult:
            return LiveResult(spec)

        with monkeypatch.context() as fails:
            fails.setattr(disk_commands, "change_live", attaches_nothing)
            assert brine(*add) == 1
            assert (live.disk("k"), os.path.exists(disk.path)) == (disk, True)

        def done_by_another(spec: Spec, *given: Any, **options: Any) -> LiveResult:
            change_live(spec, *given, **options)
            return LiveResult(spec)

        monkeypatch.setattr(disk_commands, "change_live", done_by_another)
        assert brine(*add) == 0
        assert live.disk("k").uuid == disk.uuid


def test_an_end_takes_away_no_disk_that_another_command_has_added(
    live: LiveInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = live.disk("data")
    again = ("disk", "add", NAME, "--size", "4M", "--name", "m", "--uuid", data.uuid)
    assert brine(*again) == 1

    def told_to_end(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(disk_commands, "define_instance", told_to_end)
    assert brine("disk", "add", NAME, "--size", "4M", "--dry-run") == 130
    # Another command has added it while this one waited.
    monkeypatch.setattr(disk_commands, "_define_and_plug", told_to_end)
    assert brine(*again) == 130
    assert (live.disk("data"), os.path.exists(data.path)) == (data, True)


def test_a_growth_that_the_guest_sees_later_is_no_failure(
    live: LiveInstance, capsys: pytest.CaptureFixture[str]
) -> None:
    with live.running():
        define_instance(web1(ROOT, DATA | {"interface": "virtio"}, {"name": "k", "size_mib": 4}))
        for word in ("grown", "unchanged"):
            capsys.readouterr()
            assert brine("disk", "grow", NAME, "k", "6M", "--json") == 0
            told = json.loads(capsys.readouterr().out)
            assert (told["result"], told["seen_by_guest"]) == (word, False)
    assert os.stat(live.disk("k").path).st_size == 6 * MIB


def test_a_guest_keeps_a_disk_on_ide_until_its_next_start(
    live: LiveInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = raw_image(tmp_path / "plain.raw")
    with live.running():
        assert brine("disk", "add", NAME, "--path", plain) == 0
        old = {"name": "old", "size_mib": 4, "interface": "ide"}
        define_instance(web1(ROOT, DATA | {"interface": "virtio"}, old))
        disk = live.disk("old")

        def started(runtime: Runtime) -> Runtime:
            rows = (runtime.started_with() or {})["disks"]
            return runtime.with_started(disks=[*rows, to_json(disk)])

        change_file(InstanceFiles(NAME).runtime, started)
        assert brine("disk", "remove", NAME, "old", "--delete") == 1
        assert live.disk("old") == disk
        capsys.readouterr()
        assert brine("disk", "remove", NAME, "old") == 0
        assert "until its next start" in capsys.readouterr().out
        assert os.path.exists(disk.path)
        assert "old" not in [one.name for one in store.load(NAME).disks]
        with pytest.raises(SpecError, match=f"{plain} is also a disk of {NAME}"):
            define_instance({**web1({"path": plain}), "name": "web2"})
        assert brine("disk", "add", NAME, "--size", "4M", "--name", "new") == 0
        with pytest.raises(InstanceError, match=f"{disk.path} is also a disk of {NAME}"):
            refuse_in_use(completed({**web1({"path": disk.path}), "name": "web2"}))
    kept = [live.disk(name).path for name in ("root", "data", "new")]
    assert {one.path for one in with_last_run(store.load(NAME)).disks} == {*kept, plain}
