"""One disk in two instances: only one of them may write it, whatever its name is."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.operation import OperationKind, begin
from brine.instance import store
from brine.instance.conflicts import refuse_conflicts, refuse_in_use
from brine.instance.registry import define_instance
from brine.instance.store import InstanceError
from brine.instance.validate import completed
from brine.vm import conflicts, run
from brine.vm.conflicts import identities_lock
from brine.vm.files import InstanceFiles
from brine.vm.instances import DOMAIN_SPEC
from brine.vm.markers import MarkerKind, write_marker
from brine.vm.spec import SpecError, to_json
from brine.vm.unit_name import unit_of
from lab.fake_qemu import FakeQemus


@pytest.fixture
def disk(own_node: Path) -> Path:
    """An image that is there, on a node of its own."""
    image = own_node / "image"
    image.write_bytes(b"")
    return image


def with_disk(name: str, path: Path | str, **keys: Any) -> dict[str, Any]:
    return {"name": name, "disks": [{"path": str(path), **keys}]}


def linked(disk: Path) -> Path:
    """Another name of an image."""
    link = disk.with_name("link")
    link.symlink_to(disk)
    return link


@pytest.mark.parametrize("how", ["symlink", "hard link", "dots", "not there yet"])
def test_the_second_one_is_refused_by_the_name_of_the_first(disk: Path, how: str) -> None:
    if how == "not there yet":
        disk.unlink()
    define_instance(with_disk("web1", disk))
    other = disk.parent / "sub" / ".." / disk.name
    if how == "hard link":
        other = disk.with_name("other")
        os.link(disk, other)
    elif how == "dots":
        (disk.parent / "sub").mkdir()
    else:
        other = linked(disk)
    with pytest.raises(SpecError) as told:
        define_instance(with_disk("web2", other))
    assert str(told.value) == f"/disks/0/path: {other} is also a disk of web1, as {disk}"
    assert store.names() == ["web1"]


def test_nodes_of_the_same_device_are_the_same_disk(disk: Path) -> None:
    first, second, other = (disk.with_name(name) for name in ("a", "dm-0", "dm-1"))
    try:
        for node, minor in ((first, 0), (second, 0), (other, 1)):
            os.mknod(node, 0o600 | stat.S_IFBLK, os.makedev(7, minor))
    except PermissionError:
        pytest.skip("only root can make devices")
    define_instance(with_disk("web1", first))
    with pytest.raises(SpecError, match=f"{second} is also a disk of web1, as {first}"):
        refuse_conflicts(completed(with_disk("web2", second)), None)
    refuse_conflicts(completed(with_disk("web2", other)), None)


def test_one_that_nobody_writes_may_be_shared(disk: Path) -> None:
    define_instance(with_disk("web1", disk, read_only=True))
    define_instance(with_disk("web2", disk, read_only=True))
    with pytest.raises(SpecError, match="is also a disk of web1"):
        define_instance(with_disk("web3", disk))


def test_what_another_writes_is_no_medium_of_a_drive(disk: Path) -> None:
    drive = {"cdroms": [str(disk)]}
    define_instance({"name": "web1", **drive})
    define_instance({"name": "web2", **drive})
    with pytest.raises(SpecError, match="^/disks/0/path: .* is also a disk of web1"):
        define_instance(with_disk("web3", disk))
    define_instance(with_disk("web3", disk, read_only=True))
    other = disk.with_name("other")
    define_instance(with_disk("db1", other))
    define_instance({"name": "web1"})
    with pytest.raises(SpecError, match="^/cdroms/0: .* is also a disk of db1"):
        define_instance({"name": "web1", "cdroms": [str(other)]})
    with pytest.raises(SpecError, match="^/cdroms/0: .* is another of its disks too"):
        define_instance({**with_disk("db1", other), "cdroms": [str(other)]})


def test_that_of_one_that_is_offline_is_free(disk: Path) -> None:
    define_instance({**with_disk("web1", disk), "admin_state": "offline"})
    # So is that of a spec that says nothing.
    (paths.SPECS_DIR / "web0.json").write_text("{")
    (paths.SPECS_DIR / "web9.json").write_text('{"disks": [5, {"path": 5}]}')
    define_instance(with_disk("web2", disk))
    # Who wants it back is refused, and named.
    with pytest.raises(SpecError, match="is also a disk of web2"):
        define_instance({**with_disk("web1", disk, cache="unsafe"), "admin_state": "down"})


def test_that_of_a_damaged_spec_is_what_it_was_started_with(disk: Path) -> None:
    define_instance({**with_disk("web1", disk), "nics": [{"link": "br0"}]})
    file = paths.SPECS_DIR / "web1.json"
    started = json.loads(file.read_text())
    runtime = {"spec": started, "nics": started["nics"], "disks": started["disks"]}
    (paths.RUNTIME_DIR / "web1.json").write_text(json.dumps(runtime))
    file.write_text("{")
    with pytest.raises(SpecError, match="is also a disk of web1"):
        define_instance(with_disk("web2", disk))
    mac = {"link": "br0", "mac": started["nics"][0]["mac"]}
    with pytest.raises(SpecError, match="is the MAC address of web1"):
        define_instance({"name": "web2", "nics": [mac]})
    # Of one that has not run since the node's start nothing is known.
    (paths.RUNTIME_DIR / "web1.json").unlink()
    define_instance(with_disk("web2", disk))


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "web1", "disks": [{"path": "%s"},]}',
        '{"name": "web1", "disks": {"path": "%s"}}',
        '{"name": "web1", "disks": [{"path": "/a", "backing": {"path": "/b"}}, {"path": "%s"',
        '{"name": "web1", "disks": [5, {"path": "%s"}]}',
        '[{"path": "%s"}]',
    ],
)
def test_a_disk_that_a_spec_names_which_cant_be_used_is_its_instances(
    disk: Path, text: str, has_run: bool
) -> None:
    paths.SPECS_DIR.mkdir(exist_ok=True)
    (paths.SPECS_DIR / "web1.json").write_text(text % disk)
    if has_run:
        last = {"spec": {"disks": [{"path": "/of/last"}]}, "nics": [], "disks": []}
        (paths.RUNTIME_DIR / "web1.json").write_text(json.dumps(last))
    for keys in ({}, {"read_only": True}):
        with pytest.raises(SpecError, match="is also a disk of web1"):
            define_instance(with_disk("web2", disk, **keys))
    # What is below a disk, and what is read only, may be shared.
    shared = '{"disks": [{"path": "/a", "backing": {"path": "%s"}}, {"read_only": true, "path": "%s'
    (paths.SPECS_DIR / "web1.json").write_text(f'{shared % (disk, "/c")}"')
    define_instance(with_disk("web2", disk, read_only=True))
    define_instance(with_disk("web3", "/c", read_only=True))


def test_a_definition_that_changes_nothing_waits_for_no_other_command(disk: Path) -> None:
    spec = with_disk("web1", disk)
    assert define_instance(spec).changed
    with identities_lock():
        assert not define_instance(spec).changed


def test_an_instance_has_no_disk_twice(disk: Path) -> None:
    link = linked(disk)
    disks = [{"path": str(disk)}, {"path": str(link)}]
    with pytest.raises(SpecError, match=f"/disks/1/path: {link} is another of its disks too"):
        define_instance({"name": "web1", "disks": disks})


def test_what_is_plugged_in_counts_and_what_is_unplugged_does_not(disk: Path) -> None:
    plugged = disk.with_name("plugged")
    plugged.write_bytes(b"")
    define_instance(with_disk("web1", disk))
    started = json.loads((paths.SPECS_DIR / "web1.json").read_text())
    runtime = {"spec": started, "nics": [], "disks": [{"path": str(plugged)}]}
    (paths.RUNTIME_DIR / "web1.json").write_text(json.dumps(runtime))
    with pytest.raises(SpecError, match="is also a disk of web1"):
        define_instance(with_disk("web2", plugged))
    define_instance(with_disk("web2", disk))


# At the start


def runs(qemus: FakeQemus, name: str, **runtime: Any) -> None:
    """An instance that runs, as its runtime file says."""
    (paths.RUNTIME_DIR / f"{name}.json").write_text(json.dumps(runtime))
    qemus.start(InstanceFiles(name).qmp)


@pytest.mark.parametrize("plugged", [True, False])
def test_one_that_runs_has_its_disks_to_itself(
    disk: Path, qemus: FakeQemus, *, plugged: bool
) -> None:
    """Those that were plugged in, too, and those of IDE, which nobody plugs."""
    row = {"path": str(disk), "read_only": False}
    ide = {"disks": [{**row, "interface": "ide"}]}
    runs(qemus, "web1", **({"disks": [row]} if plugged else {"spec": ide, "disks": []}))
    link = linked(disk)
    with pytest.raises(InstanceError) as told:
        refuse_in_use(completed(with_disk("web2", link)))
    assert str(told.value) == f"web2: {link} is also a disk of web1, as {disk}, which runs"
    assert "stop web1" in (told.value.hint or "")
    refuse_in_use(completed(with_disk("web1", disk)))


def test_one_that_has_ended_has_none(disk: Path, qemus: FakeQemus) -> None:
    (paths.RUNTIME_DIR / "web1.json").write_text(json.dumps({"disks": [{"path": str(disk)}]}))
    refuse_in_use(completed(with_disk("web2", disk)))
    InstanceFiles("web1").qmp.touch()  # which it has left
    refuse_in_use(completed(with_disk("web2", disk)))


def test_what_is_unplugged_is_free_and_a_damaged_runtime_file_keeps_nobody(
    disk: Path, qemus: FakeQemus
) -> None:
    runs(qemus, "web1", spec={"disks": [{"path": str(disk), "interface": "virtio"}]}, disks=[])
    refuse_in_use(completed(with_disk("web2", disk)))
    for content in ("{", "[]", '{"disks": 5, "spec": {"disks": 5}}'):
        (paths.RUNTIME_DIR / "web1.json").write_text(content)
        refuse_in_use(completed(with_disk("web2", disk)))


# Storage that does not answer


@pytest.fixture
def silent(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk whose storage is dead. While it is asked, other commands can have the lock."""
    path, is_answered, stat_of = own_node / "dead" / "image", threading.Event(), os.stat

    def answer(asked: Any, *given: Any, **keys: Any) -> os.stat_result:
        if asked == str(path):
            with identities_lock():
                pass
            is_answered.wait()
        return stat_of(asked, *given, **keys)

    monkeypatch.setattr(os, "stat", answer)
    monkeypatch.setattr(conflicts, "STORAGE_TIMEOUT_S", 2.0)
    yield path
    is_answered.set()


def test_the_dead_disk_of_another_keeps_nobody_from_a_start(
    disk: Path, silent: Path, qemus: FakeQemus
) -> None:
    runs(qemus, "web1", disks=[{"path": str(silent)}, {"path": str(disk)}])
    other = disk.with_name("other")
    other.write_bytes(b"")
    with identities_lock(partial(refuse_in_use, completed(with_disk("web2", other)))):
        pass
    # What answers there counts.
    with pytest.raises(InstanceError, match="is also a disk of web1"):
        refuse_in_use(completed(with_disk("web2", linked(disk))))


def test_an_own_dead_disk_is_refused(disk: Path, silent: Path, qemus: FakeQemus) -> None:
    runs(qemus, "web1", disks=[{"path": str(disk)}])
    with pytest.raises(BrineError, match=f"{silent}: its storage does not answer"):
        refuse_in_use(completed(with_disk("web2", silent)))


def test_a_disk_that_another_gets_meanwhile_is_asked_without_the_lock(
    disk: Path, qemus: FakeQemus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check comes again, and then it finds the conflict."""
    link, stat_of, is_free = linked(disk), os.stat, []
    checked = partial(refuse_in_use, completed(with_disk("web2", disk)))
    qemus.start(InstanceFiles("web1").qmp)

    def check(keys: conflicts.IdentityKeys) -> None:
        checked(keys)  # as nothing is there yet
        file = paths.RUNTIME_DIR / "web1.json"
        if not file.exists():
            file.write_text(json.dumps({"disks": [{"path": str(link)}]}))

    def answer(asked: Any, *given: Any, **keys: Any) -> os.stat_result:
        if asked == str(link):
            with identities_lock():
                is_free.append(True)
        return stat_of(asked, *given, **keys)

    monkeypatch.setattr(os, "stat", answer)
    with pytest.raises(InstanceError, match="is also a disk of web1"), identities_lock(check):
        pass
    assert is_free


# MAC addresses and UUIDs

MAC, UUID = "52:54:00:aa:00:01", "0b5bcb4e-8f2c-4f2e-9ab6-6f7b1b0a3b0d"


def with_mac(name: str, mac: str = MAC, **keys: Any) -> dict[str, Any]:
    return {"name": name, "nics": [{"link": "br0", "mac": mac}], **keys}


def test_one_that_runs_has_its_mac_and_uuid_to_itself(own_node: Path, qemus: FakeQemus) -> None:
    runs(qemus, "web1", spec={"uuid": UUID}, nics=[{"mac": MAC.upper()}])
    with pytest.raises(InstanceError, match=f"{MAC} is the MAC address of web1, which runs"):
        refuse_in_use(completed(with_mac("web2")))
    with pytest.raises(InstanceError, match=f"{UUID} is the UUID of web1, which runs"):
        refuse_in_use(completed({"name": "web2", "uuid": UUID}))
    refuse_in_use(completed(with_mac("web1", uuid=UUID)))


def test_a_domain_that_runs_has_its_mac_to_itself(
    own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file tells, as nothing is plugged into a domain."""
    monkeypatch.setattr(run, "runs_in", lambda pid, unit: (pid, unit) == (7, unit_of("xen1")))
    domain = InstanceFiles("xen1").domain
    domain.parent.mkdir(exist_ok=True)
    spec = completed(with_mac("xen1", hypervisor="xen-pvh", kernel="/vmlinuz"))
    domain.write_text(f"{DOMAIN_SPEC}{json.dumps(to_json(spec))}\n")
    refuse_in_use(completed(with_mac("web2")))
    write_marker(MarkerKind.START, "xen1", run="run", pid=7)
    with pytest.raises(InstanceError, match=f"{MAC} is the MAC address of xen1"):
        refuse_in_use(completed(with_mac("web2")))


def test_what_is_just_being_plugged_in_counts(own_node: Path, qemus: FakeQemus) -> None:
    """The record of begun work has it; the runtime file does not yet."""
    runs(qemus, "web1", spec={}, nics=[])
    paths.VOLATILE_OPERATIONS_DIR.mkdir()
    (paths.VOLATILE_OPERATIONS_DIR / "run-6.json").write_text("{")
    given: dict[str, Any] = {"instance": "web1", "process": "socket", "nics": [{"mac": MAC}]}
    plugging = OperationKind("hotplug", {}, is_volatile=True)
    with begin(plugging, "vm/web1") as work:
        work.step("add", facts={"claims": given})
        with pytest.raises(InstanceError, match=f"{MAC} is the MAC address of web1"):
            refuse_in_use(completed(with_mac("web2")))
        given["process"] = "4194304"  # above the highest PID: it has ended
        work.note()
        refuse_in_use(completed(with_mac("web2")))


def test_a_plugged_mac_is_its_instances_at_the_next_start_too(own_node: Path) -> None:
    define_instance({"name": "web1"})
    started = json.loads((paths.SPECS_DIR / "web1.json").read_text())
    runtime = {"spec": started, "nics": [{"mac": MAC}], "disks": []}
    (paths.RUNTIME_DIR / "web1.json").write_text(json.dumps(runtime))
    with pytest.raises(SpecError, match=f"^/nics/0/mac: {MAC} is the MAC address of web1"):
        define_instance(with_mac("web2"))


@pytest.mark.parametrize("state", ["up", "down"])
def test_one_that_comes_back_from_offline_is_refused_what_another_has(
    disk: Path, state: str
) -> None:
    for spec in (with_mac("web1"), with_disk("web1", disk)):
        define_instance({**spec, "admin_state": "offline"})
        define_instance({**spec, "name": "web2", "uuid": ""})
        with pytest.raises(SpecError, match="of web2"):
            define_instance({**spec, "admin_state": state})
        define_instance({"name": "web2"})
        define_instance({**spec, "admin_state": state})


def test_of_many_definitions_at_once_one_gets_the_mac(own_node: Path) -> None:
    script = (
        "import json, sys; from pathlib import Path; from brine.common import paths\n"
        "folder = Path(sys.argv[1])\n"
        "for key in ('LOCK_DIR', 'RUNTIME_DIR', 'CONTROL_DIR', 'MARKS_DIR'):\n"
        "    setattr(paths, key, folder / key)\n"
        "paths.SPECS_DIR = folder / 'instances'\n"
        "from brine.instance.registry import define_instance\n"
        "print('ready', flush=True); sys.stdin.read()\n"
        "define_instance(json.loads(sys.argv[2]))\n"
    )
    names = [f"web{number}" for number in range(4)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    there = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(own_node), json.dumps(with_mac(name))],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            **pipes,  # type: ignore[call-overload]
        )
        for name in names
    ]
    for one in there:
        assert one.stdout.readline() == b"ready\n"
    for one in there:
        one.stdin.close()
    assert sorted(one.wait(60) for one in there) == [0, 1, 1, 1]
    for one in there:
        one.stdout.close()
    assert len(store.names()) == 1
