"""From the author's JSON to a complete spec: defaults, kept keys, refusals."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli as brine_command
from brine.common import paths
from brine.common.cli import main
from brine.common.entry_points import EntryPoint
from brine.instance.validate import check, completed
from brine.vm.spec import Spec, SpecError, parse, to_json

A, B = "0a000000-0000-4000-8000-00000000000a", "0b000000-0000-4000-8000-00000000000b"
MAC, MAC_2 = "52:54:00:00:00:01", "52:54:00:00:00:02"
BR = {"link": "br0"}


def web1(before: Spec | None = None, **keys: Any) -> Spec:
    return completed({"name": "web1", **keys}, before=before)


# What is filled in


def test_each_has_a_uuid_and_each_nic_a_mac() -> None:
    spec = web1(disks=[{"path": "/a"}, {"path": "/b"}], nics=[BR, BR])
    uuids = {spec.uuid, *(disk.uuid for disk in spec.disks), *(nic.uuid for nic in spec.nics)}
    assert len(uuids) == 5
    assert all(str(uuid.UUID(one)) == one for one in uuids)
    macs = {nic.mac for nic in spec.nics}
    assert len(macs) == 2
    assert all(re.fullmatch("52:54:00(:[0-9a-f]{2}){3}", mac) for mac in macs)
    assert (spec.admin_state, spec.admin_state_source) == ("down", "admin")
    other = completed({"name": "web2", "nics": [BR]})
    assert spec.uuid != other.uuid
    assert other.nics[0].mac not in macs


def test_a_spec_without_a_processor_model_has_the_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "SSCONF_DIR", tmp_path)
    assert web1().cpu == ""
    file = tmp_path / "ssconf_hvparams_kvm"
    for line, emulated in (("cpu_type=Haswell,+aes", "Haswell,+aes"), ("cpu_type=host,-svm", "")):
        file.write_text(f"acpi=True\n{line}\n")
        assert web1().cpu == line.removeprefix("cpu_type=")
        assert web1(accel="tcg").cpu == emulated
        assert web1(cpu="qemu64").cpu == "qemu64"
        assert web1(cpu="").cpu == ""
    assert completed({"name": "web1", "hypervisor": "xen-pvm", "kernel": "/k"}).cpu == ""
    file.write_text("cpu_type=\n")
    assert web1().cpu == ""


@pytest.mark.parametrize(
    ("keys", "useless"),
    [
        ({}, ()),
        ({"kernel": "/k"}, ()),
        ({"boot_order": ["network"], "hotplug_ports": 4, "machine": "q35"}, ()),
        ({"boot_order": ["network"], "kernel": "/k"}, ("boot_order",)),
        ({"hotplug_ports": 4}, ("hotplug_ports",)),
    ],
)
def test_what_another_key_makes_useless_is_known(
    keys: dict[str, Any], useless: tuple[str, ...]
) -> None:
    assert web1(**keys).keys_without_effect() == useless


def test_the_version_of_a_machine_type_stays() -> None:
    started = replace(web1(), machine="pc-i440fx-7.2")
    for given in ({}, {"machine": "pc"}, {"machine": "pc-i440fx-7.2"}):
        assert web1(before=started, **given) == started
    for other in ("q35", "pc-i440fx-10.0", "pc-q35-7.2"):
        assert web1(before=started, machine=other).machine == other
    pcie = replace(web1(machine="q35"), machine="pc-q35-7.2")
    assert web1(before=pcie, machine="q35") == pcie
    domain = {"name": "web1", "hypervisor": "xen-pvm", "kernel": "/k"}
    assert completed(domain, before=started).machine == "pc"


def test_a_nic_without_a_link_has_the_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "SSCONF_DIR", tmp_path)
    (tmp_path / "ssconf_nicparams").write_text("mode=openvswitch\nlink=ovs0\n")
    spec = web1(nics=[{}, {"link": "ovs1"}, {"mode": "bridged", "link": "br0"}])
    assert [(nic.mode, nic.link) for nic in spec.nics] == [
        ("openvswitch", "ovs0"),
        ("openvswitch", "ovs1"),
        ("bridged", "br0"),
    ]
    with pytest.raises(SpecError, match="needs its bridge"):
        web1(nics=[{"mode": "bridged"}])


def test_a_disk_is_the_same_to_what_plugs_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("CONTROL_DIR", "MARKS_DIR", "LOCK_DIR", "RUNTIME_DIR"):
        monkeypatch.setattr(paths, name, tmp_path)
    (tmp_path / "web1.json").write_text('{"nics": [], "disks": []}')
    entry = EntryPoint("disk", "brine.hotplug.cli:DISK")
    monkeypatch.setattr(
        brine_command, "entry_points", lambda group: [entry] * (group == "brine.commands")
    )
    command = ["disk", "add", "web1", "--path", "/srv/é.img", "--no-hotplug", "--json"]
    assert main(command) == 0
    plugged = json.loads(capsys.readouterr().out)["uuid"]
    assert web1(disks=[{"path": "/srv/é.img"}]).disks[0].uuid == plugged


def test_what_was_said_stays_but_for_capitals() -> None:
    spec = web1(
        uuid=A.upper(),
        disks=[{"path": "/a", "uuid": A.upper()}],
        nics=[{"uuid": B.upper(), "mac": "AA:00:00:AB:CD:EF", **BR}],
    )
    assert (spec.uuid, spec.disks[0].uuid) == (A, A)
    assert (spec.nics[0].uuid, spec.nics[0].mac) == (B, "aa:00:00:ab:cd:ef")


# What is kept from the spec before


def test_the_same_again_is_the_same() -> None:
    given: dict[str, Any] = {"disks": [{"path": "/é"}], "nics": [BR, {"mac": MAC, **BR}]}
    before = web1(**given)
    assert web1(before, **given) == web1(**given) == before
    before = web1(disks=[{"path": "/a", "uuid": A}], nics=[BR, {"uuid": B, **BR}], vcpus=3)
    before = replace(before, admin_state="up")
    assert completed(to_json(before), before=before) == before


def test_whether_the_format_of_a_disk_was_said_is_kept() -> None:
    unsaid = completed({"name": "web1", "disks": [{"path": "/a"}]})
    assert unsaid.disks[0].format_source == "default"
    said = completed({"name": "web1", "disks": [{"path": "/a", "format": "raw"}]}, before=unsaid)
    assert said.disks[0].format_source == "admin"
    assert completed({"name": "web1", "disks": [{"path": "/a"}]}, before=said) == said
    again = completed(to_json(unsaid), before=unsaid)
    assert again == unsaid


def test_all_else_is_as_it_is_said_now() -> None:
    before = web1(vcpus=4, tags=["a"], nics=[{"vlan": "7", **BR}], uuid=A)
    assert web1(before, uuid=B).uuid == B
    after = web1(before, memory_mib=512, nics=[BR])
    assert after.uuid == A
    assert (after.vcpus, after.tags, after.memory_mib) == (1, (), 512)
    assert after.nics[0].vlan == ""


@pytest.mark.parametrize(("state", "source"), [("up", "admin"), ("down", "user")])
def test_the_admin_state_is_nobodys_wish_to_change(state: str, source: str) -> None:
    before = replace(web1(), admin_state=state, admin_state_source=source)
    after = web1(before, vcpus=2)
    assert (after.admin_state, after.admin_state_source) == (state, source)
    after = web1(before, admin_state="offline")
    assert (after.admin_state, after.admin_state_source) == ("offline", "admin")


def test_a_nic_keeps_its_mac_and_uuid_by_its_place() -> None:
    before = web1(nics=[{"uuid": A, **BR}, {"uuid": B, **BR}])
    after = web1(before, nics=[BR, {"link": "br1"}, BR])
    assert [(nic.uuid, nic.mac) for nic in after.nics[:2]] == [
        (nic.uuid, nic.mac) for nic in before.nics
    ]
    assert after.nics[1].link == "br1"
    assert after.nics[2].mac not in {nic.mac for nic in before.nics}


def test_a_nic_that_is_named_is_that_one_wherever_it_stands_now() -> None:
    before = web1(nics=[{"uuid": A, "mac": MAC, **BR}, {"uuid": B, "mac": MAC_2, **BR}])
    by_uuid = web1(before, nics=[{"uuid": B.upper(), **BR}])
    assert [(nic.uuid, nic.mac) for nic in by_uuid.nics] == [(B, MAC_2)]
    by_mac = web1(before, nics=[{"mac": MAC_2.upper(), **BR}])
    assert [(nic.uuid, nic.mac) for nic in by_mac.nics] == [(B, MAC_2)]


def test_a_nic_does_not_take_what_another_one_is_named_by() -> None:
    before = web1(nics=[{"mac": MAC, **BR}, {"mac": MAC_2, **BR}])
    after = web1(before, nics=[{"mac": MAC_2, **BR}, BR])
    assert after.nics[0] == before.nics[1]
    assert after.nics[1].mac not in (MAC, MAC_2)
    # Another address in the same place is another NIC.
    assert web1(web1(nics=[{"uuid": A, **BR}]), nics=[{"mac": MAC, **BR}]).nics[0].uuid != A


def test_a_disk_keeps_its_uuid_by_its_path() -> None:
    before = web1(disks=[{"path": "/a", "uuid": A}, {"path": "/b", "uuid": B}])
    after = web1(before, disks=[{"path": "/b"}, {"path": "/c"}])
    assert after.disks[0].uuid == B
    assert after.disks[1].uuid not in (A, B)


# What is refused

NAMED_UUID = "0a000000-0000-4000-8000-00000000000c"  # begins as A does

ROUTED = {"mode": "routed", "ips": ["192.0.2.1"]}
DISK = {"path": "/a", "uuid": A}
SLOW = {"path": "/b", "aio": "native", "cache": "writeback"}
IDE = [{"path": f"/{number}", "interface": "ide"} for number in range(5)]

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"vcpus": 4, "sockets": 2, "cores": 2, "threads": 2}, "/vcpus", "sockets, cores and threads"),
    ({"vcpus": 3, "cores": 2}, "/vcpus", "can't be divided among 2"),
    ({"vcpus": 4, "sockets": 3, "threads": 2}, "/vcpus", "can't be divided among 6"),
    ({"boot_order": ["disk", "floppy"]}, "/boot_order/1", "must be one of disk, cdrom, network, "),
    ({"boot_order": ["disk", "disk"]}, "/boot_order/1", "disk is there twice"),
    ({"initrd": "/i"}, "/initrd", "needs a kernel"),
    ({"append": "quiet"}, "/append", "needs a kernel"),
    ({"kernel": "/k", "firmware": "/f"}, "/firmware", "a kernel is started without a firmware"),
    ({"firmware": "UEFI"}, "/firmware", "is neither uefi nor an absolute path"),
    ({"disks": [{"path": "/a"}, SLOW]}, "/disks/1/aio", "native needs a cache mode that is direct"),
    ({"disks": [{**IDE[0], "read_only": True}]}, "/disks/0/read_only", "a disk of the interface"),
    ({"disks": [DISK, {**DISK, "uuid": B}]}, "/disks/1", "/a is the path of another disk too"),
    ({"disks": [DISK, {"path": "/b", "uuid": NAMED_UUID}]}, "/disks/1", "0a000000 begins as"),
    ({"nics": [{}]}, "/nics/0", "a NIC that is bridged needs its bridge"),
    ({"nics": [{"mode": "openvswitch"}]}, "/nics/0", "a NIC that is openvswitch needs its bridge"),
    ({"nics": [BR, {"link": "a/b"}]}, "/nics/1", "'a/b' can't be the name of a bridge"),
    ({"nics": [{"mode": "routed"}]}, "/nics/0", "a routed NIC needs its address"),
    ({"nics": [{**ROUTED, "vlan": "7"}]}, "/nics/0", "a routed NIC has no VLAN"),
    ({"nics": [{"vhost": True, "model": "rtl8139", **BR}]}, "/nics/0/vhost", "only virtio has it"),
    ({"nics": [{"mtu": 60, **BR}]}, "/nics/0", "the MTU must be 68 to 65521, not 60"),
    ({"nics": [{"queues": 2, "model": "e1000", **BR}]}, "/nics/0/queues", "only virtio has sev"),
    ({"nics": [{"mac": MAC, **BR}, {"mac": MAC, "uuid": A, **BR}]}, "/nics/1", f"{MAC} is the"),
    ({"nics": [{"uuid": A, **BR}, {"uuid": NAMED_UUID, **BR}]}, "/nics/1", "0a000000 begins as"),
    ({"vnc_port": 5900}, "/vnc_port", "needs vnc_bind"),
    ({"vnc_password_file": "/p"}, "/vnc_password_file", "needs vnc_bind"),
    ({"vnc_bind": "/s", "vnc_port": 5900}, "/vnc_port", "a VNC socket has no port"),
    ({"vnc_bind": "::1", "vnc_port": 5899}, "/vnc_port", "must be 5900 or more, but is 5899"),
    ({"security_model": "user"}, "/security_user", "the security model user needs it"),
    ({"security_model": "user", "security_user": "root"}, "/security_user", "must not be root"),
    ({"security_user": "x"}, "/security_user", "is not used by the security model pool"),
    ({"disks": IDE}, "", "no slot left: 4 disks and CD-ROMs have the interface ide"),
    ({"nics": [BR] * 21}, "", "no slot left: 20 disks and NICs have slots 12 to 31 of pci.0"),
    ({"machine": "q35", "hotplug_ports": 0, "nics": [BR] * 25}, "", "no slot left: 25 disks and"),
    (
        {"machine": "q35", "hotplug_ports": 24, "nics": [BR]},
        "/hotplug_ports",
        "beside the disks and NICs there is room for 23, but it is 24",
    ),
]


@pytest.mark.parametrize(
    ("keys", "hint"),
    [
        ({"nics": [BR] * 40}, "leave out 20 NICs"),
        ({"nics": [BR] * 20, "disks": [DISK]}, "give disks the interface scsi"),
    ],
)
def test_a_hint_to_what_makes_room(keys: dict[str, Any], hint: str) -> None:
    with pytest.raises(SpecError, match="no slot left") as told:
        web1(**keys)
    assert told.value.hint == hint


@pytest.mark.parametrize(("keys", "where", "said"), REFUSED)
def test_what_does_not_go_together_is_refused(keys: dict[str, Any], where: str, said: str) -> None:
    with pytest.raises(SpecError) as told:
        web1(**keys)
    assert told.value.where == where
    assert str(told.value).startswith(f"{where}: {said}" if where else said)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"nics": [{}]}, '"link": "br0"'),
        ({"nics": [{"mode": "routed"}]}, '"ips": ["192.0.2.10"]'),
        ({"disks": [{"path": "/a", "aio": "native", "cache": "unsafe"}]}, "aio threads"),
        ({"vnc_port": 5901}, '"vnc_bind": "127.0.0.1"'),
    ],
)
def test_hints_say_what_would_do(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as told:
        web1(**keys)
    assert said in (told.value.hint or "")


@pytest.mark.parametrize(
    "keys",
    [
        {"vcpus": 8, "sockets": 2, "cores": 2, "threads": 2},
        {"vcpus": 4, "cores": 2},
        {"boot_order": []},
        {"kernel": "/k", "initrd": "/i", "append": "quiet"},
        {"disks": [{"path": "/a", "aio": "native", "cache": "directsync"}]},
        {"disks": [{"path": "/a", "read_only": True}], "cdroms": ["/a", "/a"]},
        {"nics": [{"mode": "routed", "ips": ["192.0.2.1", "2001:db8::1"], "link": "100"}]},
        {"machine": "q35", "hotplug_ports": 23, "nics": [BR]},
        {"hotplug_ports": 24, "nics": [BR] * 20},  # which a pc machine has no use for
        {"nics": [{"vlan": "7", "mtu": 9000, "queues": 4, "vhost": True, **BR}]},
        {"vnc_bind": "127.0.0.1", "vnc_port": 5900, "vnc_password_file": "/p"},
        {"vnc_bind": "/run/vnc", "vnc_password_file": "/p"},
        {"security_model": "user", "security_user": "guests", "chroot": True},
    ],
)
def test_what_goes_together_is_taken(keys: dict[str, Any]) -> None:
    assert web1(**keys).name == "web1"


# What Xen does not know

SMALLEST: dict[str, Any] = {"name": "web1", "hypervisor": "xen-pvh", "kernel": "/k"}


def test_a_spec_that_xen_knows() -> None:
    disks = [{"path": "/d", "format": "qcow2", "read_only": True, "discard": False}]
    nics = [{"mac": MAC, "mtu": 9000, **BR}]
    keys = {"memory_mib": 64, "vcpus": 2, "initrd": "/i", "append": "x", "cpu_weight": 512}
    found = completed({**SMALLEST, **keys, "disks": disks, "nics": nics})
    assert found.is_xen()
    assert completed({"name": "web1", "hypervisor": "xen-pvm", "disks": disks}).kernel == ""


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"machine": "q35"}, "/machine"),
        ({"cpu": "host"}, "/cpu"),
        ({"huge_pages": "/dev/hugepages"}, "/huge_pages"),
        ({"vnc_bind": "127.0.0.1"}, "/vnc_bind"),
        ({"cdroms": ["/cd.iso"]}, "/cdroms"),
        ({"security_model": "pool"}, "/security_model"),
        ({"memory_max_mib": 4096}, "/memory_max_mib"),
        ({"serial_console": False}, "/serial_console"),
        ({"disks": [{"path": "/a"}, {"path": "/d", "interface": "scsi"}]}, "/disks/1/interface"),
        ({"disks": [{"path": "/d", "cache": "writeback"}]}, "/disks/0/cache"),
        ({"nics": [{"mac": MAC, **BR, "vlan": "7"}]}, "/nics/0/vlan"),
        ({"nics": [{"mac": MAC, **BR, "model": "e1000"}]}, "/nics/0/model"),
        ({"disks": [{"path": f"/{number}"} for number in range(27)]}, "/disks"),
        ({"extra_arguments": ["cpus = '1'", 'on_crash="destroy"']}, "/extra_arguments/1"),
        ({"extra_arguments": [" uuid = 'x'"]}, "/extra_arguments/0"),
        ({"extra_arguments": ["cpus = '1'; name='x'"]}, "/extra_arguments/0"),
        ({"extra_arguments": ["cpus = '1'\non_reboot='x'"]}, "/extra_arguments/0"),
    ],
)
def test_what_only_qemu_knows(keys: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        completed({**SMALLEST, **keys})
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("keys", "least_mib"),
    [
        ({"memory_mib": 1024}, 1024 + 256 + 4),
        ({"memory_mib": 65536, "disks": [{"path": "/a"}, {"path": "/b"}]}, 65536 + 256 + 256 + 64),
        ({"memory_mib": 1024, "huge_pages": "/dev/hugepages"}, 256 + 4),
        ({"memory_mib": 1024, "accel": "tcg"}, 1024 + 256 + 4 + 1024),
    ],
)
def test_a_limit_has_room_for_the_guest_and_qemu(keys: dict[str, Any], least_mib: int) -> None:
    spec = {"name": "web1", **keys}
    assert completed({**spec, "memory_max_mib": least_mib}).memory_max_mib == least_mib
    assert completed({**spec, "memory_max_mib": 0}).memory_max_mib == 0
    with pytest.raises(SpecError) as caught:
        completed({**spec, "memory_max_mib": least_mib - 1})
    assert caught.value.where == "/memory_max_mib"
    assert str(least_mib) in str(caught.value)


def test_a_kernel_must_come_from_somewhere() -> None:
    with pytest.raises(SpecError) as caught:
        completed({"name": "web1", "hypervisor": "xen-pvm"})
    assert caught.value.where == "/kernel"


def test_what_is_as_if_left_out_is_no_fault() -> None:
    plain = Spec(
        name="web1", hypervisor="xen-pvm", kernel="/k", security_model="none", chroot=False
    )
    check(replace(plain, uuid=A, machine="pc"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"qemu": "/usr/bin/qemu-system-aarch64"}, "Brine runs /usr/bin/qemu-system-x86_64"),
        ({"firmware": "/usr/share/OVMF/OVMF_CODE_4M.ms.fd"}, 'write "uefi"'),
        ({"firmware": "/usr/share/OVMF/OVMF_VARS.fd"}, 'write "uefi"'),
        ({"firmware": "/usr/share/edk2/x64/edk2-x86_64-code.fd"}, 'write "uefi"'),
    ],
)
def test_what_does_not_work_is_told_with_what_does(data: Any, said: str) -> None:
    with pytest.raises(SpecError) as told:
        completed({"name": "web1", **data})
    assert said in str(told.value)


def test_a_firmware_in_one_file_and_an_own_qemu_are_taken() -> None:
    data = {"firmware": "/usr/share/ovmf/OVMF.fd", "qemu": "/opt/qemu/bin/qemu-system-i386"}
    assert completed({"name": "web1", **data}).firmware == data["firmware"]


def test_what_a_spec_has_already_stays() -> None:
    data = {"name": "web1", "firmware": "/usr/share/OVMF/OVMF_CODE.fd"}
    before = parse(Spec, data)
    assert completed({**data, "vcpus": 2}, before=before).firmware == data["firmware"]
