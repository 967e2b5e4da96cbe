"""``brine instance import``: from an image, or from what virsh dumpxml has printed, to a spec."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brine.common.errors import BrineError
from brine.instance.importing import spec_of_domain
from brine.instance.validate import define

Run = Callable[..., tuple[int, str, str]]

# As virt-manager makes them.
DOMAIN = """
<domain type="kvm">
  <name>web1</name>
  <uuid>8f3b8a9e-5a52-4c3f-9b56-3e3e9fd6b1a1</uuid>
  <metadata><libosinfo:libosinfo xmlns:libosinfo="http://x"/></metadata>
  <memory unit="KiB">2097152</memory>
  <currentMemory unit="KiB">2097152</currentMemory>
  <vcpu placement="static">4</vcpu>
  <os firmware="efi">
    <type arch="x86_64" machine="pc-q35-7.2">hvm</type>
    <nvram>/var/lib/libvirt/qemu/nvram/web1_VARS.fd</nvram>
    <boot dev="hd"/><boot dev="network"/>
  </os>
  <features><acpi/><apic/><vmport state="off"/></features>
  <cpu mode="host-passthrough"><topology sockets="1" dies="1" cores="2" threads="2"/></cpu>
  <clock offset="utc"><timer name="rtc" tickpolicy="catchup"/></clock>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>restart</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type="file" device="disk">
      <driver name="qemu" type="qcow2" cache="none" io="native" discard="unmap"/>
      <source file="/var/lib/libvirt/images/web1.qcow2"/>
      <target dev="vda" bus="virtio"/>
      <iotune><total_iops_sec>100</total_iops_sec></iotune>
    </disk>
    <disk type="block" device="disk">
      <driver name="qemu" type="raw"/>
      <source dev="/dev/vg0/data"/>
      <target dev="sda" bus="sata"/>
      <serial>DATA1</serial>
    </disk>
    <disk type="file" device="cdrom">
      <source file="/srv/debian.iso"/><target dev="sdb" bus="sata"/><readonly/>
    </disk>
    <disk type="network" device="disk">
      <source protocol="rbd" name="pool/image"/><target dev="vdb" bus="virtio"/>
    </disk>
    <controller type="usb" index="0" model="qemu-xhci"/>
    <interface type="bridge">
      <mac address="52:54:00:12:34:56"/><source bridge="br0"/><model type="virtio"/>
      <vlan><tag id="42"/></vlan>
    </interface>
    <serial type="pty"><target type="isa-serial" port="0"/></serial>
    <console type="pty"><target type="serial" port="0"/></console>
    <channel type="unix"><target type="virtio" name="org.qemu.guest_agent.0"/></channel>
    <input type="tablet" bus="usb"/>
    <input type="mouse" bus="ps2"/>
    <graphics type="vnc" port="-1" autoport="yes" listen="127.0.0.1" passwd="secret"/>
    <graphics type="spice" autoport="yes"/>
    <hostdev mode="subsystem" type="pci"/>
    <memballoon model="virtio"/>
  </devices>
</domain>
"""

SPEC = {
    "name": "web1",
    "uuid": "8f3b8a9e-5a52-4c3f-9b56-3e3e9fd6b1a1",
    "hypervisor": "kvm",
    "machine": "pc-q35-7.2",
    "cpu": "host",
    "vcpus": 4,
    "sockets": 1,
    "cores": 2,
    "threads": 2,
    "memory_mib": 2048,
    "firmware": "uefi",
    "boot_order": ["disk", "network"],
    "rtc": "utc",
    "usb_tablet": True,
    "vnc_bind": "127.0.0.1",
    "cdroms": ["/srv/debian.iso"],
    "qemu": "/usr/bin/qemu-system-x86_64",
    "disks": [
        {
            "path": "/var/lib/libvirt/images/web1.qcow2",
            "format": "qcow2",
            "cache": "none",
            "aio": "native",
        },
        {"path": "/dev/vg0/data", "format": "raw", "interface": "ide", "serial": "DATA1"},
    ],
    "nics": [{"mac": "52:54:00:12:34:56", "link": "br0", "vlan": "42", "model": "virtio"}],
}

LOST = {
    "os/nvram: the UEFI variables begin anew",
    "on_crash destroy: the watcher starts it again",
    "devices/graphics passwd: put it into a file, for vnc_password_file",
    "the bus of /dev/vg0/data, sata: the spec has ide",
    "features/vmport",
    "clock/timer",
    "devices/disk/iotune",
    "devices/disk type=network device=disk",
    "devices/graphics type=spice",
    "devices/hostdev type=pci",
    "devices/memballoon model=virtio",
}


def changed(*changes: tuple[str, str]) -> bytes:
    """The domain with some of its text in other words."""
    text = DOMAIN
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text.encode()


def test_a_domain_becomes_a_spec_and_what_it_loses_is_listed() -> None:
    data, lost = spec_of_domain(DOMAIN.encode())
    assert data == SPEC
    assert sorted(lost) == sorted(LOST)
    spec = define(data)
    assert spec.disks[0].backing is None
    assert (spec.disks[1].serial, spec.nics[0].vlan, spec.guest_agent) == ("DATA1", "42", True)


def test_the_chain_of_an_overlay_is_taken_over() -> None:
    source = '<source file="/var/lib/libvirt/images/web1.qcow2"/>'

    def stored(kind: str, image_format: str, image: str) -> str:
        inside = f'<format type="{image_format}"/><source {image}'
        return f'<backingStore type="{kind}">{inside}</backingStore>'

    chain = stored("block", "raw", 'dev="/dev/vg0/base"/>')
    chain = source + stored("file", "qcow2", f'file="/srv/middle.qcow2"/>{chain}')
    data, lost = spec_of_domain(changed((source, chain)))
    assert set(lost) == LOST
    base = {"path": "/dev/vg0/base", "format": "raw"}
    middle = {"path": "/srv/middle.qcow2", "format": "qcow2", "backing": base}
    assert data["disks"][0]["backing"] == middle
    network = stored("network", "raw", 'protocol="nbd"/>')
    data, lost = spec_of_domain(changed((source, source + network)))
    assert "backing" not in data["disks"][0]
    assert set(lost) == LOST | {"devices/disk/backingStore type=network"}


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        (('type="kvm"', 'type="qemu"'), "accel", "tcg"),
        (("<acpi/>", ""), "acpi", False),
        (("org.qemu.guest_agent.0", "com.redhat.spice.0"), "guest_agent", False),
        (("<on_reboot>restart", "<on_reboot>destroy"), "reboot_behavior", "exit"),
        (("<on_poweroff>destroy", "<on_poweroff>restart"), "user_shutdown", "restart"),
        (('mode="host-passthrough"', 'mode="maximum"'), "cpu", "max"),
        (('offset="utc"', 'offset="localtime"'), "rtc", "localtime"),
        (('port="-1" autoport="yes"', 'port="5901" autoport="no"'), "vnc_port", 5901),
        (('<memory unit="KiB">2097152', '<memory unit="KiB">4096'), "memory_mib", 4),
        (('<memory unit="KiB">2097152', f'<memory unit="b">{1 << 20}'), "memory_mib", 1),
        (('<memory unit="KiB">2097152', '<memory unit="MB">2048'), "memory_mib", 1953),
        (('<memory unit="KiB">2097152', '<memory unit="GiB">1'), "memory_mib", 1024),
    ],
)
def test_each_part_has_its_key(change: tuple[str, str], key: str, value: object) -> None:
    assert spec_of_domain(changed(change))[0][key] == value


def test_a_nic_of_a_libvirt_network_takes_a_bridge_by_name() -> None:
    xml = changed(
        ('<interface type="bridge">', '<interface type="network">'),
        ('<source bridge="br0"/>', '<source network="default"/>'),
    )
    with pytest.raises(BrineError, match="on no bridge, but of the network default") as refused:
        spec_of_domain(xml)
    assert "--link BRIDGE" in str(refused.value.hint)
    data, lost = spec_of_domain(xml, link="br7")
    assert data["nics"][0]["link"] == "br7"
    assert "the NIC 52:54:00:12:34:56, of the network default" in lost


@pytest.mark.parametrize(
    ("xml", "said"),
    [
        (b"<domain", "is no XML"),
        (b"{}", "is no XML"),
        (b"<network/>", "is the XML of a network, not of a domain"),
        (b"<domain type='lxc'/>", "is a domain of lxc"),
        (b"<domain type='xen'><os><type>hvm</type></os></domain>", "type hvm"),
        (b"<!DOCTYPE d [<!ENTITY a 'aa'>]><domain>&a;</domain>", "document type"),
        (b"<domain type='kvm'><memory unit='furlong'>1</memory></domain>", "furlong"),
        (b"<domain type='kvm'><vcpu>many</vcpu></domain>", "should be a number"),
    ],
)
def test_what_is_no_domain_of_ours_is_refused_in_one_line(xml: bytes, said: str) -> None:
    with pytest.raises(BrineError, match=said) as refused:
        spec_of_domain(xml)
    assert "\n" not in str(refused.value)


def test_an_image_is_defined_with_the_format_that_it_shows(brine: Run, tmp_path: Path) -> None:
    image = tmp_path / "mail1.img"
    image.write_bytes(b"QFI\xfb" + bytes(200))
    status, out, _ = brine("import", image, "--link", "br0", "--memory-mib", 512, "--json")
    assert status == 0
    spec: dict[str, Any] = json.loads(out)["spec"]
    assert (spec["name"], spec["memory_mib"]) == ("mail1", 512)
    assert (spec["disks"][0]["path"], spec["disks"][0]["format"]) == (str(image), "qcow2")
    assert spec["nics"][0]["link"] == "br0"
    # What is defined already is not written over.
    status, _, said = brine("import", image)
    assert status == 1
    assert said.startswith(
        "brine: error: mail1: there is an instance of that name already\nbrine: hint: "
    )


def test_an_image_that_brine_does_not_open_is_to_be_converted(brine: Run, tmp_path: Path) -> None:
    image = tmp_path / "mail1.vm"
    vdi = bytes(64) + bytes.fromhex("7f10dabe")
    begins = {"VMDK": b"KDMV", "VHDX": b"vhdxfile", "VDI": vdi, "LUKS": b"LUKS\xba\xbe"}
    for name, content in begins.items():
        image.write_bytes(content + bytes(200))
        status, _, said = brine("import", image)
        assert status == 1
        assert f"is an image of the format {name}" in said
        assert "hint: qemu-img convert -O qcow2" in said


def test_a_domain_is_defined_and_its_losses_are_warnings(brine: Run, tmp_path: Path) -> None:
    file = tmp_path / "web1.xml"
    file.write_text(DOMAIN)
    status, out, said = brine("import", "--libvirt", file, "--dry-run")
    assert (status, json.loads(out)) == (0, SPEC)
    # A processor that is emulated is not the node's own.
    status, _, said = brine("import", "--libvirt", file, "--dry-run", "--accel", "tcg")
    assert status == 0
    assert "no counterpart: cpu host" in said
    status, out, said = brine("import", "--libvirt", file, "--name", "web2")
    assert (status, out) == (0, "defined: web2; brine instance start web2\n")
    warnings = said.splitlines()
    assert len(warnings) == len(LOST)
    assert "brine: warning: web2: no counterpart: devices/hostdev type=pci" in warnings
    file.write_text("<domain")
    status, _, said = brine("import", "--libvirt", file)
    assert status == 1
    assert said.startswith(f"brine: error: {file}: is no XML: ")
    for arguments in ((), (tmp_path, "--libvirt", "-")):  # it takes one source
        assert brine("import", *arguments)[0] == 2
