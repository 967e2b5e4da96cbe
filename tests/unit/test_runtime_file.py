"""Runtime files of three forms, and what `brine nic` and `brine disk` record in them."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli, paths
from brine.common.entry_points import EntryPoint
from brine.common.locks import locked
from brine.hotplug.transaction import Pending, PendingAction
from brine.vm.address import DeviceKind, uuid_of_mac
from brine.vm.runtime_file import Runtime, RuntimeFileError, change_file

NIC = {"uuid": "n1", "mac": "aa:00:00:00:00:01", "pci": 13}
DISK = {"uuid": "d1", "size": 1024, "pci": 14}
UUID = "9fb0b0f9-0000-4000-8000-00000000000a"
DEVICE_ID = "nic-9fb0b0f9-pci-13"
MAC, OTHER_MAC = "aa:00:00:00:00:01", "aa:00:00:00:00:02"

NEW: dict[DeviceKind, dict[str, Any]] = {
    DeviceKind.NIC: {
        "uuid": "d2",
        "mac": "aa:00:00:00:00:02",
        "ip": None,
        "nicparams": {"mode": "bridged", "link": "br0", "vlan": ""},
        "model": "virtio",
        "queues": 1,
        "pci": 15,
        "hvinfo": {"driver": "virtio-net-pci", "id": "nic-x", "bus": "pci.0", "addr": "0xf"},
    },
    DeviceKind.DISK: {
        "uuid": "d2",
        "path": "/dev/vg/lv",
        "format": "raw",
        "read_only": True,
        "size_mib": 1024,
        "pci": 15,
        "hvinfo": {"driver": "virtio-blk-pci", "id": "disk-x", "bus": "pci.0", "addr": "0xf"},
    },
}
# The slots of Ganeti's classes, which its FromDict insists on.
GANETIS_KEYS = {
    DeviceKind.NIC: {
        *("name", "mac", "ip", "network", "nicparams", "netinfo", "pci", "hvinfo", "uuid"),
    },
    DeviceKind.DISK: {
        *("dev_type", "logical_id", "children", "nodes", "iv_name", "size", "mode", "params"),
        *("spindles", "pci", "hvinfo", "name", "uuid"),
    },
}

OURS: Any = {"format": 1, "command": ["qemu"], "nics": [NIC], "disks": [DISK], "more": {"x": 1}}
GANETI: Any = [["kvm", "-m"], [NIC], {"acpi": True}, [[DISK, "/dev/link", "kvm:uri"]]]
OLDER: Any = [["kvm", "-drive"], [{"uuid": "n1", "mac": "aa:00:00:00:00:01"}], {"acpi": True}]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime file without devices, and `brine nic`."""
    monkeypatch.setattr(paths, "LOCK_DIR", tmp_path / "locks")
    entry = EntryPoint("nic", "brine.hotplug.cli:NIC")
    monkeypatch.setattr(cli, "entry_points", lambda group: [entry] * (group == "brine.commands"))
    return written(tmp_path, {"nics": [], "disks": [], "spec": {}})


def written(folder: Path, data: Any) -> Path:
    file = folder / "web1.json"
    file.write_text(json.dumps(data))
    return file


# Its forms.


@pytest.mark.parametrize("data", [OURS, GANETI, OLDER])
@pytest.mark.parametrize("kind", DeviceKind)
def test_a_device_comes_and_goes_and_all_else_is_kept(
    tmp_path: Path, data: Any, kind: DeviceKind
) -> None:
    file = written(tmp_path, data)
    expected = [*OLDER, []] if data is OLDER else data
    Runtime.load(file).save(file)
    assert json.loads(file.read_text()) == expected
    Runtime.load(file).with_device(kind, NEW[kind], link="/dev/vg/lv").save(file)
    runtime = Runtime.load(file)
    found = runtime.find(kind, "d2")
    assert found
    assert (found["pci"], found["hvinfo"]) == (15, NEW[kind]["hvinfo"])
    # Again it is no change, also without its slot.
    placeless = {key: NEW[kind][key] for key in NEW[kind] if key not in ("pci", "hvinfo")}
    for device in (NEW[kind], placeless):
        assert runtime.with_device(kind, device, link="/dev/vg/lv") == runtime
    runtime.without_device(kind, "d2").save(file)
    assert json.loads(file.read_text()) == expected


def test_ganetis_form_has_each_disks_link_and_no_key_that_ganeti_does_not_know(
    tmp_path: Path,
) -> None:
    file = written(tmp_path, GANETI)
    for kind, device in NEW.items():
        Runtime.load(file).with_device(kind, device, link="/dev/vg/lv").save(file)
    _, nics, _, disks = json.loads(file.read_text())
    assert disks[0] == [DISK, "/dev/link", "kvm:uri"]
    disk, link, uri = disks[1]
    assert (link, uri) == ("/dev/vg/lv", None)
    assert (disk["dev_type"], disk["logical_id"]) == ("blockdev", ["manual", "/dev/vg/lv"])
    assert (disk["size"], disk["mode"], disk["iv_name"]) == (1024, "ro", "disk/1")
    assert disk.keys() <= GANETIS_KEYS[DeviceKind.DISK]
    assert nics[-1].keys() <= GANETIS_KEYS[DeviceKind.NIC]
    assert nics[-1]["nicparams"] == NEW[DeviceKind.NIC]["nicparams"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("5", "is no runtime file"),
        ("[]", "is no runtime file"),
        ("[[], [], {}, [], []]", "is no runtime file"),
        ("[[], [5], {}]", "is no runtime file"),
        ('{"nics": 5}', "is no runtime file"),
        ('{"nics": [{}]}', "is no runtime file"),
        ("[[], [], {}, [[]]]", "is no runtime file"),
    ],
)
def test_what_is_none_is_told_and_left_alone(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "web1.json"
    file.write_text(content)
    with pytest.raises(RuntimeFileError, match=said):
        Runtime.load(file)
    assert file.read_text() == content


def test_what_is_no_file_is_told_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", ".", "none"):
        with pytest.raises(RuntimeFileError, match="Is no regular file|directory"):
            Runtime.load(tmp_path / name)


@pytest.mark.parametrize(("data", "there"), [(OURS, None), (GANETI, "/dev/link")])
def test_the_uuid_of_one_disk_is_not_given_to_another(
    tmp_path: Path, data: Any, there: str | None
) -> None:
    runtime, disk = Runtime.load(written(tmp_path, data)), NEW[DeviceKind.DISK]
    if there:
        with pytest.raises(RuntimeFileError, match=f"is {there} there"):
            runtime.with_device(DeviceKind.DISK, {**disk, "uuid": "d1"})
    runtime = runtime.with_device(DeviceKind.DISK, disk, link="/dev/vg/lv")
    with pytest.raises(RuntimeFileError, match="is /dev/vg/lv there, not /dev/vg/other"):
        runtime.with_device(DeviceKind.DISK, {**disk, "path": "/dev/vg/other"})


def test_devices_are_known_by_id_uuid_mac_serial_and_path(tmp_path: Path) -> None:
    disk_id = "disk-6a0f4f0d-pci-14"
    uuid, other = "6a0f4f0d-0000-4000-8000-00000000000a", "7a0f4f0d-0000-4000-8000-00000000000a"
    nic = {**NIC, "hvinfo": {"id": DEVICE_ID}}
    disks = [
        {"uuid": uuid, "serial": None, "hvinfo": {"id": disk_id}},
        {"uuid": other, "serial": "data", "path": "/dev/vg/Data"},
    ]
    runtime = Runtime.load(written(tmp_path, {"nics": [nic], "disks": disks}))
    for reference in ("n1", DEVICE_ID, "AA:00:00:00:00:01"):
        assert runtime.known_as(DeviceKind.NIC, reference) == [nic]
    for reference in (uuid, disk_id, uuid[:20], uuid.upper()):
        assert runtime.known_as(DeviceKind.DISK, reference) == [disks[0]]
    for reference in ("data", other, "/dev/vg/Data", "/dev/vg/../vg/Data"):
        assert runtime.known_as(DeviceKind.DISK, reference) == [disks[1]]
    for reference in (other[:20], "/dev/vg/data"):
        assert runtime.known_as(DeviceKind.DISK, reference) == []


@pytest.mark.parametrize("nothing", [{}, {"uuid": None}])
def test_devices_of_old_ganetis_without_uuids_get_some_that_stay(
    tmp_path: Path, nothing: dict[str, None]
) -> None:
    nics = [{"mac": mac, "ip": None, **nothing} for mac in (MAC, OTHER_MAC)]
    disk = {"logical_id": ["vg", "lv"], **nothing}
    file = written(tmp_path, [["kvm"], nics, {}, [[disk, "/dev/vg/lv"]]])
    runtime = Runtime.load(file)
    assert runtime.find(DeviceKind.NIC, uuid_of_mac(MAC))
    assert len({one["uuid"] for one in runtime.devices[DeviceKind.NIC]}) == 2
    assert Runtime.load(file) == runtime
    runtime.save(file)
    assert Runtime.load(file).devices == runtime.devices


# Changes, by several at the same time.


def with_nic(runtime: Runtime, uuid: str) -> Runtime:
    return runtime.with_device(DeviceKind.NIC, {"uuid": uuid, "hvinfo": {"id": DEVICE_ID}})


def pending(action: PendingAction, file: Path, uuid: str, **known: Any) -> Pending:
    return Pending(action, DeviceKind.NIC, uuid, DEVICE_ID, runtime=str(file), **known)


def test_changes_at_the_same_time_and_by_different_paths_are_all_there(
    tmp_path: Path, file: Path
) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(file.name)

    def add(number: int) -> None:
        path = (file, link)[number % 2]
        change_file(path, lambda runtime: with_nic(runtime, f"n{number}"), timeout_s=60)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(24)))
    assert len(Runtime.load(file).devices[DeviceKind.NIC]) == 24


def test_what_is_so_already_is_not_written(file: Path) -> None:
    assert change_file(file, lambda runtime: with_nic(runtime, UUID))
    before = file.stat()
    assert not change_file(file, lambda runtime: with_nic(runtime, UUID))
    after = file.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_who_holds_it_for_too_long_is_named(file: Path) -> None:
    change_file(file, lambda runtime: with_nic(runtime, UUID))
    (lock,) = paths.LOCK_DIR.glob("runtime-web1-*.lock")
    with (
        locked(lock, timeout_s=1),
        pytest.raises(RuntimeFileError, match=f"locked by process {os.getpid()}"),
    ):
        change_file(
            file, lambda runtime: runtime.without_device(DeviceKind.NIC, UUID), timeout_s=0.1
        )


def test_a_removal_takes_out_the_one_that_had_the_id(file: Path) -> None:
    twin = UUID[:-1] + "b"
    for uuid, slot in ((UUID, 13), (twin, 14)):
        device = {"uuid": uuid, "pci": slot, "hvinfo": {"id": f"nic-9fb0b0f9-pci-{slot}"}}
        pending(PendingAction.ADD, file, uuid, device=device).record(plugged=True)
    # Of what another program plugged in, only the beginning of the UUID is known.
    pending(PendingAction.REMOVE, file, UUID[:8]).record(plugged=False)
    assert [one["uuid"] for one in Runtime.load(file).devices[DeviceKind.NIC]] == [twin]


# `brine nic add` and `modify` with --no-hotplug.


def run(file: Path, verb: str, *words: str) -> int:
    """Run the command on a file, with no VM there."""
    vm = ["--qmp", str(file.with_name("web9.qmp")), "--runtime", str(file)]
    return cli.main(["nic", verb, *words, "--no-hotplug", *vm])


def nics_of(file: Path) -> Any:
    return json.loads(file.read_text())["nics"]


def test_a_recorded_nic_is_changed_for_the_next_start(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(file, "add", "--link", "br0", "--mac", MAC, "--tag", "web", "--queues", "2")
    run(file, "add", "--link", "br0", "--mac", OTHER_MAC)
    before, second = nics_of(file)
    capsys.readouterr()

    text = file.read_text()
    assert run(file, "modify", MAC, "--link", "br1", "--dry-run") == 0
    assert capsys.readouterr().out.startswith("would be recorded: nic ")
    assert file.read_text() == text

    assert run(file, "modify", MAC, "--link", "br1", "--vlan", "7", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"uuid": before["uuid"], "recorded": True, "changed": True, "dry_run": False}
    after, same = nics_of(file)
    assert after == {**before, "nicparams": {"mode": "bridged", "link": "br1", "vlan": "7"}}
    assert same == second

    assert run(file, "modify", before["uuid"], "--link", "br1") == 0
    assert capsys.readouterr().out.startswith("unchanged: ")
    # Another mode has a link of its own, and checks what it needs.
    with pytest.raises(SystemExit):
        run(file, "modify", MAC, "--mode", "routed")
    assert "needs its address" in capsys.readouterr().err
    assert run(file, "modify", MAC, "--mode", "routed", "--ip", "192.0.2.10") == 0
    routed, _ = nics_of(file)
    assert routed["nicparams"] == {"mode": "routed", "link": "", "vlan": ""}
    assert routed["ips"] == ["192.0.2.10"]


def test_a_new_nic_has_the_clusters_mode_and_link(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "SSCONF_DIR", tmp_path)
    (tmp_path / "ssconf_nicparams").write_text("mode=openvswitch\nlink=ovs0\nvlan=\n")
    run(file, "add")
    run(file, "add", "--mode", "bridged", "--link", "br0")
    found = [(nic["nicparams"]["mode"], nic["nicparams"]["link"]) for nic in nics_of(file)]
    assert found == [("openvswitch", "ovs0"), ("bridged", "br0")]


def test_a_place_in_the_vm_stays_with_a_recorded_nic(file: Path) -> None:
    run(file, "add", "--link", "br0", "--mac", MAC)
    data = json.loads(file.read_text())
    place = {"pci": 13, "hvinfo": {"bus": "pci.0", "addr": "0xd", "id": DEVICE_ID}}
    data["nics"][0].update(place)
    file.write_text(json.dumps(data))
    assert run(file, "modify", DEVICE_ID, "--mac", "aa:00:00:00:00:09") == 0
    (nic,) = nics_of(file)
    assert nic["mac"] == "aa:00:00:00:00:09"
    assert {key: nic[key] for key in place} == place


def test_a_recorded_nic_can_not_be_what_another_is(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for one in (MAC, OTHER_MAC):
        run(file, "add", "--link", "br0", "--mac", one)
    before = file.read_text()
    for words, said in (
        ((MAC, "--mac", OTHER_MAC), f"{OTHER_MAC} is the MAC address of NIC"),
        (("never", "--link", "br1"), "no nic is known as never"),
    ):
        with pytest.raises(SystemExit):
            run(file, "modify", *words)
        assert said in capsys.readouterr().err
        assert file.read_text() == before


def test_a_nic_in_ganetis_form_is_changed(file: Path) -> None:
    params = {"mode": "bridged", "link": "br0", "vlan": ""}
    nic = {"uuid": "u1", "mac": MAC, "ip": None, "nicparams": params}
    file.write_text(json.dumps([["kvm"], [nic], {}, []]))
    assert run(file, "modify", "u1", "--link", "br1") == 0
    (changed,) = json.loads(file.read_text())[1]
    assert (changed["nicparams"], changed["mac"]) == ({**params, "link": "br1"}, MAC)
