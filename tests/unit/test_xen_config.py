"""A spec as xl reads it."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any

import pytest

from brine.instance.validate import completed
from brine.instance.xen.config import DISK_KEYS, KEYS, NIC_KEYS, configuration
from brine.vm.disk import Disk
from brine.vm.nic import Nic
from brine.vm.spec import Spec, SpecError, parse

UUID = "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f"


def spec(*, hypervisor: str, **keys: Any) -> Spec:
    found = parse(Spec, {"name": "web1", "uuid": UUID, **keys})
    return replace(found, hypervisor=hypervisor)


def settings(**keys: Any) -> dict[str, Any]:
    """The settings in the file; its values happen to be JSON, but for the escapes."""
    text = configuration(spec(hypervisor="xen-pvh", **keys)).replace("\\x", "\\u00")
    pairs = (line.split(" = ", 1) for line in text.splitlines())
    return {key: json.loads(value) for key, value in pairs}


def test_what_has_ended_stays_and_what_reboots_does() -> None:
    found = settings()
    assert found["on_poweroff"] == found["on_crash"] == found["on_watchdog"] == "preserve"
    assert found["on_reboot"] == "restart"
    assert settings(reboot_behavior="exit")["on_reboot"] == "preserve"


@pytest.mark.parametrize(("hypervisor", "kind"), [("xen-pvm", "pv"), ("xen-pvh", "pvh")])
def test_its_kind(hypervisor: str, kind: str) -> None:
    text = configuration(spec(hypervisor=hypervisor))
    assert f'type = "{kind}"\n' in text
    assert f'uuid = "{UUID}"\n' in text


def test_a_kernel_or_what_finds_one_on_the_disk() -> None:
    found = settings(kernel="/k", initrd="/i", append='root=/dev/xvda "quiet"')
    assert (found["kernel"], found["ramdisk"]) == ("/k", "/i")
    assert found["cmdline"] == 'root=/dev/xvda "quiet"'
    assert settings()["kernel"] == "/usr/lib/grub-xen/grub-i386-xen_pvh.bin"
    assert "bootloader" not in found | settings()


@pytest.mark.parametrize("text", ['a"b = "c', "a\\", 'a\\" ] b = 1', "'"])
def test_no_string_ends_before_its_end(text: str) -> None:
    (line,) = [
        one
        for one in configuration(spec(hypervisor="xen-pvm", append=text)).split("\n")
        if one.startswith("cmdline")
    ]
    assert re.fullmatch(r'cmdline = "([^"\\]|\\x[0-9a-f]{2})*"', line)


def test_a_link_brings_no_other_key() -> None:
    with pytest.raises(SpecError, match="can't be the name of a bridge"):
        completed({"name": "web1", "hypervisor": "xen-pvh", "nics": [{"link": "br0,script=/a"}]})


def test_disks_in_order_with_the_path_last() -> None:
    disks: list[dict[str, Any]] = [
        {"path": "/dev/vg/a,b"},
        {"path": "/d.qcow2", "format": "qcow2", "read_only": True},
    ]
    first, second = settings(disks=[{**disk, "discard": False} for disk in disks])["disk"]
    assert first == "format=raw,vdev=xvda,access=rw,no-discard,target=/dev/vg/a,b"
    assert second == "format=qcow2,vdev=xvdb,access=ro,no-discard,target=/d.qcow2"


def test_nics_by_their_mode() -> None:
    mac = "52:54:00:00:00:01"
    nics: list[dict[str, Any]] = [
        {"link": "br0", "mtu": 9000},
        {"link": "br1", "mode": "openvswitch"},
        {"mode": "routed", "ips": ["192.0.2.1", "2001:db8::1"]},
    ]
    found = settings(nics=[{"mac": mac, **nic} for nic in nics])["vif"]
    assert found == [
        f"mac={mac},bridge=br0,script=vif-bridge,mtu=9000",
        f"mac={mac},bridge=br1,script=vif-openvswitch",
        f"mac={mac},script=vif-route,ip=192.0.2.1 2001:db8::1",
    ]


ROUTED = {"mode": "routed", "ips": ["192.0.2.1"]}


def test_a_routed_nic_has_no_table_of_its_own() -> None:
    given = {"name": "web1", "hypervisor": "xen-pvh", "kernel": "/k"}
    assert completed({**given, "nics": [ROUTED]}).nics[0].link == ""
    with pytest.raises(SpecError, match="100 can't be the routing table") as caught:
        completed({**given, "nics": [{"link": "br0"}, {**ROUTED, "link": "100"}]})
    assert caught.value.where == "/nics/1/link"


# Accepted keys that xl is not told of: other parts act on them, and some only name a thing.
ELSEWHERE = {
    *("node", "version", "admin_state", "admin_state_source", "tags", "user_shutdown"),
    *("shutdown_timeout", "start_timeout", "wait_for_network", "start_order", "owner", "ignored"),
    *("slice", "claim_serial"),
}
VALUES: dict[str, Any] = {
    "uuid": UUID.replace("6", "7"),
    "hypervisor": "xen-pvm",
    "name": "web2",
    "vcpus": 2,
    "memory_mib": 512,
    "kernel": "/l",
    "initrd": "/i",
    "append": "quiet",
    "disks": [{"path": "/d"}],
    "nics": [{"link": "br0"}],
    "reboot_behavior": "exit",
    "extra_arguments": ["nestedhvm = 1"],
    "cpu_weight": 5,
    "cpu_limit_percent": 50,
    "path": "/e",
    "format": "qcow2",
    "read_only": True,
    "discard": False,
    "mac": "52:54:00:00:00:02",
    "mode": "openvswitch",
    "link": "br1",
    "mtu": 1400,
    "ips": ["192.0.2.7"],
}


@pytest.mark.parametrize("key", sorted(KEYS - ELSEWHERE))
def test_a_key_that_is_accepted_acts(key: str) -> None:
    before = {"name": "web1", "uuid": UUID, "kernel": "/k", "hypervisor": "xen-pvh"}
    texts = [configuration(parse(Spec, one)) for one in (before, {**before, key: VALUES[key]})]
    assert texts[0] != texts[1]


_OF_BRINE = ("uuid", "name", "unit", "size_mib", "by_hand")


@pytest.mark.parametrize("key", sorted(DISK_KEYS - {*_OF_BRINE, "format_source"}))
def test_a_disks_key_that_is_accepted_acts(key: str) -> None:
    disks = ({"path": "/d"}, {"path": "/d", key: VALUES[key]})
    first, second = (settings(disks=[one])["disk"] for one in disks)
    assert first != second


@pytest.mark.parametrize("mode", ["bridged", "openvswitch", "routed"])
@pytest.mark.parametrize("key", sorted(NIC_KEYS - {*_OF_BRINE}))
def test_a_nics_key_that_is_accepted_acts(key: str, mode: str) -> None:
    if (key, mode) in (("link", "routed"), ("mode", "openvswitch")):
        return  # the first is refused, and the second is no change
    nic = {"mac": "52:54:00:00:00:01", "mode": mode, **({} if mode == "routed" else {"link": "b"})}
    first, second = (settings(nics=[one])["vif"] for one in (nic, {**nic, key: VALUES[key]}))
    assert first != second


def test_further_lines_come_last() -> None:
    text = configuration(spec(hypervisor="xen-pvm", extra_arguments=["maxmem = 4096"]))
    assert text.endswith("\nmaxmem = 4096\n")


def test_the_keys_are_a_specs() -> None:
    assert {field.name for field in fields(Spec)} >= KEYS
    assert {field.name for field in fields(Disk)} >= DISK_KEYS
    assert {field.name for field in fields(Nic)} >= NIC_KEYS
