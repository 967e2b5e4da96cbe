"""What of a spec Xen does not know is refused, with its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from brine.instance.spec import Spec, SpecError
from brine.instance.validate import check_domain, define

SMALLEST: dict[str, Any] = {"name": "web1", "hypervisor": "xen-pvh", "kernel": "/k"}
MAC = "52:54:00:00:00:01"


def test_a_spec_that_xen_knows() -> None:
    disks = [{"path": "/d", "format": "qcow2", "read_only": True, "discard": False}]
    nics = [{"mac": MAC, "link": "br0", "mtu": 9000}]
    keys = {"memory_mib": 64, "vcpus": 2, "initrd": "/i", "append": "x", "cpu_weight": 512}
    found = define({**SMALLEST, **keys, "disks": disks, "nics": nics})
    assert found.is_xen()
    assert define({"name": "web1", "hypervisor": "xen-pvm", "disks": disks}).kernel == ""


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
        ({"disks": [{"path": "/a"}, {"path": "/d", "interface": "scsi"}]}, "/disks/1/interface"),
        ({"disks": [{"path": "/d", "cache": "writeback"}]}, "/disks/0/cache"),
        ({"nics": [{"mac": MAC, "link": "br0", "vlan": "7"}]}, "/nics/0/vlan"),
        ({"nics": [{"mac": MAC, "link": "br0", "model": "e1000"}]}, "/nics/0/model"),
        ({"disks": [{"path": f"/{number}"} for number in range(27)]}, "/disks"),
        ({"extra_arguments": ["cpus = '1'", 'on_crash="destroy"']}, "/extra_arguments/1"),
        ({"extra_arguments": [" uuid = 'x'"]}, "/extra_arguments/0"),
        ({"extra_arguments": ["cpus = '1'; name='x'"]}, "/extra_arguments/0"),
        ({"extra_arguments": ["cpus = '1'\non_reboot='x'"]}, "/extra_arguments/0"),
    ],
)
def test_what_only_qemu_knows(keys: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        define({**SMALLEST, **keys})
    assert caught.value.where == where


def test_a_kernel_must_come_from_somewhere() -> None:
    with pytest.raises(SpecError) as caught:
        define({"name": "web1", "hypervisor": "xen-pvm"})
    assert caught.value.where == "/kernel"


def test_what_is_as_if_left_out_is_no_fault() -> None:
    plain = Spec(
        name="web1", hypervisor="xen-pvm", kernel="/k", security_model="none", chroot=False
    )
    check_domain(replace(plain, machine="pc"))
