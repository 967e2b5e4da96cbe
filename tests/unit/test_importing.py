"""``brine instance import``: from an image, or from a definition of libvirt's, to a spec."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brine.common.errors import BrineError
from brine.instance import importing
from brine.instance.foreign.libvirt import spec_of_domain
from brine.instance.validate import completed
from brine.vm.spec import SpecError

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

NETWORK_DISK = (
    "devices/disk[vdb] type=network device=disk (source protocol=rbd name=pool/image, "
    "target dev=vdb bus=virtio): the guest does not have it"
)
LOST = {
    "metadata: the notes of other programs",
    "os/nvram /var/lib/libvirt/qemu/nvram/web1_VARS.fd: the guest starts with new UEFI variables",
    "on_crash destroy: the watcher starts it again",
    "devices/graphics passwd: put it into a file, for vnc_password_file",
    "features/vmport state=off",
    "clock/timer name=rtc tickpolicy=catchup",
    "devices/disk[vda]/iotune (total_iops_sec 100)",
    NETWORK_DISK,
    "devices/graphics type=spice autoport=yes",
    "devices/hostdev mode=subsystem type=pci",
    "devices/memballoon model=virtio",
}


def changed(*changes: tuple[str, str]) -> bytes:
    """The domain with some of its text in other words."""
    text = DOMAIN
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text.encode()


STORES = '<backingStore><source file="/b"/>' * 10 + "</backingStore>" * 10


def test_a_domain_becomes_a_spec_and_what_it_loses_is_listed() -> None:
    data, lost = spec_of_domain(DOMAIN.encode())
    assert data == SPEC
    assert sorted(lost) == sorted(LOST)
    spec = completed(data)
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
    named = "devices/disk[vda]/backingStore type=network (format type=raw, source protocol=nbd)"
    assert set(lost) == LOST | {named}


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
        (('<memory unit="KiB">2097152', '<memory unit="MB">2048'), "memory_mib", 1954),
        (('<memory unit="KiB">2097152', '<memory unit="GiB">1'), "memory_mib", 1024),
        (('listen="127.0.0.1" passwd="secret"', 'listen="0"'), "vnc_bind", "0.0.0.0"),
        (('listen="127.0.0.1"', 'listen="localhost"'), "vnc_bind", "127.0.0.1"),
        (('listen="127.0.0.1"', 'socket="/run/vnc/web1"'), "vnc_bind", "/run/vnc/web1"),
        # Nobody but this node sees a VNC that had a password and has none yet.
        (('listen="127.0.0.1"', 'listen="::"'), "vnc_bind", "127.0.0.1"),
        (('dies="1" cores="2"', 'dies="1" clusters="2" cores="1"'), "cores", 2),
        (('<boot dev="network"/>', '<boot dev="hd"/>'), "boot_order", ["disk"]),
        ((">4</vcpu>", ' current="2">4</vcpu>'), "vcpus", 2),
        (("<topology sock", '<feature name="vmx"/><topology sock'), "cpu", "host,+vmx"),
        (("pc-q35-7.2", "pc-q35-rhel9.4.0"), "machine", "q35"),
        (("pc-q35-7.2", "pc-i440fx-jammy"), "machine", "pc"),
    ],
)
def test_each_part_has_its_key(change: tuple[str, str], key: str, value: object) -> None:
    assert spec_of_domain(changed(change))[0][key] == value


@pytest.mark.parametrize(
    ("change", "key", "value", "named"),
    [
        (
            ('<vlan><tag id="42"/></vlan>', '<vlan trunk="yes"><tag id="42"/></vlan>'),
            "vlan",
            ":42",
            "",
        ),
        (
            ('<tag id="42"/>', '<tag id="7"/><tag id="42" nativeMode="untagged"/>'),
            "vlan",
            ".42:7",
            "",
        ),
        (
            ('<model type="virtio"/>', '<driver name="vhost" queues="4"/>'),
            "queues",
            None,
            "rtl8139",
        ),
        (("<source bridge", '<driver name="vhost"/><source bridge'), "vhost", True, ""),
        (('<model type="virtio"/>', ""), "model", "rtl8139", ""),  # libvirt's own default
        (("<source bridge", '<target dev="lab0"/><source bridge'), "link", "br0", "lab0"),
    ],
)
def test_a_nic_keeps_what_it_can(
    change: tuple[str, str], key: str, value: object, named: str
) -> None:
    data, lost = spec_of_domain(changed(change))
    assert data["nics"][0].get(key) == value
    assert named in "\n".join(lost)
    completed(data)


@pytest.mark.parametrize(
    ("change", "key", "value", "named"),
    [
        (
            ("DATA1", "6d0a9c56-6d8e-4b3c-9d5e-7a3c55b0e1bb"),
            "serial",
            "6d0a9c56-6d8e-4b3c-9",
            "9d5e",
        ),
        (("DATA1", "\u00fc"), "serial", None, "its serial \u00fc"),
        (("<serial>", "<readonly/><serial>"), "interface", "scsi", "read-only"),
        (('type="raw"/>', 'type="raw" iothread="2"/>'), "format", "raw", "iothread=2"),
        (('type="raw"/>', 'type="raw" cache="unsafe" io="native"/>'), "aio", None, "aio native"),
        (('dev="sda" bus="sata"', 'dev="hda"'), "interface", "ide", ""),
    ],
)
def test_a_disk_keeps_what_it_can(
    change: tuple[str, str], key: str, value: object, named: str
) -> None:
    data, lost = spec_of_domain(changed(change))
    assert data["disks"][1].get(key) == value
    assert named in "\n".join(lost)
    completed(data)


def test_a_xen_domain_loses_what_only_qemu_has_but_not_its_network() -> None:
    nic = '<interface type="bridge"><source bridge="xenbr0"/>{}</interface>'
    text = """<domain type="xen"><name>pv1</name><os><type>linux</type><boot dev="hd"/></os>
        <devices><disk><source dev="/dev/vg0/pv1"/><target dev="xvda" bus="xen"/></disk>{}</devices>
        </domain>"""
    data, lost = spec_of_domain(text.format(nic.format("")).encode())
    assert completed(data).nics[0].link == "xenbr0"
    assert lost == ["boot_order disk, which Xen's domains lack"]
    data, _ = spec_of_domain(text.format(nic.format('<vlan><tag id="7"/></vlan>')).encode())
    with pytest.raises(SpecError, match="/nics/0/vlan"):
        completed(data)


@pytest.mark.parametrize("machine", ["pc", "q35"])
def test_disks_without_a_place_on_their_bus_are_scsi(machine: str) -> None:
    disk = '<disk><source file="/srv/{0}"/><target dev="d{0}" bus="{1}"/></disk>'
    drive = '<disk device="cdrom"><target dev="c" bus="sata"/></disk>'
    disks = [
        disk.format(f"{bus}{number}", bus) for bus in ("sata", "virtio") for number in range(30)
    ]
    text = f"""<domain type="kvm"><name>web1</name><os><type machine="{machine}">hvm</type></os>
        <devices>{drive * 2}{"".join(disks)}</devices></domain>"""
    data, lost = spec_of_domain(text.encode())
    spec = completed(data)
    interfaces = [one.interface for one in spec.disks]
    assert interfaces.count("ide") == (4 if machine == "q35" else 2)
    assert interfaces.count("virtio") == (24 if machine == "q35" else 20)
    assert interfaces[0] == "ide"
    assert "/srv/virtio29: its interface virtio has no place left: scsi" in lost
    many = text.replace(drive, drive * 5)
    data, lost = spec_of_domain(many.encode())
    completed(data)
    assert "the CD-ROM drive: no place is left" in lost


def test_a_foreign_program_is_not_taken() -> None:
    ours = "<emulator>/usr/bin/qemu-system-x86_64</emulator>"
    for program in ("/usr/bin/kvm", "/usr/libexec/qemu-kvm"):
        data, lost = spec_of_domain(changed((ours, f"<emulator>{program}</emulator>")))
        assert "qemu" not in data
        assert set(lost) == LOST
    data, lost = spec_of_domain(changed((ours, "<emulator>/srv/own/qemu</emulator>")))
    assert "qemu" not in data
    assert "devices/emulator /srv/own/qemu: a QEMU of the distribution runs the guest" in lost


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
    nic = "devices/interface[52:54:00:12:34:56]"
    assert {f"{nic} type=network: it is on br7", f"{nic}/source network=default"} <= set(lost)


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
        (b"<?xml version='1.0' encoding='utf-7'?><domain/>", "is no XML"),
        (b"<?xml version='1.0' encoding='nonsense'?><domain/>", "is no XML"),
        (b"<domain>" + b"<backingStore>" * 5000, "more than 40 deep"),
        (b"<domain>" + b"<disk/>" * 200_000, "more than 20000 elements"),
        (b"<domain>" + b" " * (17 << 20), "is larger than 16 MiB"),
        (b"<domain type='kvm'><os><type arch='aarch64'>hvm</type></os></domain>", "aarch64"),
        (changed(("<serial>DATA1", "<transient/><serial>DATA1")), "transient"),
        (changed(('type="raw"', 'type="vmdk"')), "format vmdk"),
        (changed(("<serial>DATA1", STORES + "<serial>DATA1")), "more than 9 backing files"),
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


@pytest.mark.parametrize(
    ("content", "said", "hint"),
    [
        (b"<domain type='kvm'>\n", "is XML", "--libvirt"),
        ("<domain type='kvm'>\n".encode("utf-16"), "is XML", "--libvirt"),
        (b"<?xml version='1.0'?><Envelope/>", "is XML", "image"),
        (b"agent: 1\nscsi0: local-lvm:vm-100-disk-0\n", "is text", "--proxmox"),
        ("Notizen \u00fc\n".encode() * 900, "is text", "image"),
        (b'{"name": "web1"}', "is JSON", "brine instance define"),
        (b"\x1f\x8b\x08" + bytes(509), "packed by gzip", "gzip -d"),
        (b"BZh9" + bytes(508), "packed by bzip2", "bzip2 -d"),
        (b"\xfd7zXZ\0" + bytes(506), "packed by xz", "xz -d"),
        (b"\x28\xb5\x2f\xfd" + bytes(508), "packed by zstd", "zstd -d"),
        (b"PK\x03\x04" + bytes(508), "zip archive", "unzip"),
        (b"web1.ovf" + bytes(249) + b"ustar" + bytes(1786), "tar archive", "tar -xf"),
        (b"WithoutFreeSpace" + bytes(496), "Parallels", "qemu-img convert"),
        (b"WithouFreSpacExt" + bytes(496), "Parallels", "qemu-img convert"),
        (bytes(1024) + b"conectix" + bytes(504), "VHD", "qemu-img convert"),
        (b"", "is empty", ""),
        (b"\xfa\xb8" + bytes(999), "has 1001 bytes", "truncate -s %512"),
    ],
)
def test_a_file_that_is_no_disk_is_not_made_one(
    brine: Run, tmp_path: Path, content: bytes, said: str, hint: str
) -> None:
    file = tmp_path / "100.conf"
    file.write_bytes(content)
    status, out, told = brine("import", file, "--name", "web1")
    assert (status, out) == (1, "")
    error, *hints = told.splitlines()
    assert error.startswith(f"brine: error: {file}: ")
    assert said in error
    assert hint in "".join(hints)


def test_a_raw_disk_is_one(brine: Run, tmp_path: Path) -> None:
    for content in (bytes(1024), b"\xeb\x63\x90GRUB" + bytes(505), bytes(512) + b"LABELONE" * 64):
        (tmp_path / "disk.img").write_bytes(content)
        assert brine("import", tmp_path / "disk.img", "--dry-run")[0] == 0


def test_a_name_that_can_not_be_is_to_be_given(brine: Run, tmp_path: Path) -> None:
    file = tmp_path / "win 10.xml"
    file.write_bytes(changed(("<name>web1", "<name>Windows 10")))
    image = tmp_path / "win 10.img"
    image.write_bytes(bytes(512))
    for arguments in (("--libvirt", file), (image,)):
        status, _, said = brine("import", *arguments)
        assert status == 1
        assert "hint: give it another one: --name NAME" in said
        assert brine("import", *arguments, "--name", "win10", "--dry-run")[0] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_that_is_no_image_is_named(
    brine: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"{tmp_path}/images/"
    Path(folder).mkdir()
    monkeypatch.setattr(importing, "IMAGE_FOLDERS", (folder,))
    theirs, linked = Path(folder, "theirs.img"), Path(folder, "linked.img")
    theirs.write_bytes(bytes(512))
    os.chown(theirs, 4242, 4242)
    linked.symlink_to("/etc/passwd")
    image = "/var/lib/libvirt/images/web1.qcow2"
    file = tmp_path / "web1.xml"
    for path, said in {
        "/etc/shadow": "the guest can write /etc/shadow, which is in no folder of images",
        f"{folder}../x": f"the guest can write {folder}../x, which is {tmp_path}/x, which is in no",
        str(linked): f"the guest can write {linked}, which is /etc/passwd, which is in no folder",
        str(theirs): f"the guest can write {theirs}, which is a file of the user 4242",
        "/dev/sda": "the guest can write /dev/sda, which is in no folder of images",
        "/dev/shm/x": "the guest can write /dev/shm/x, which is in no folder of images",
        "/dev/vg0/web1": "",
        f"{folder}web1": "",
    }.items():
        file.write_bytes(changed((image, path), ('type="qcow2"', 'type="raw"')))
        status, _, told = brine("import", "--libvirt", file, "--dry-run")
        assert status == 0
        found = [line for line in told.splitlines() if "the guest can write" in line]
        assert len(found) == bool(said)
        assert all(line.startswith(f"brine: warning: web1: {said}") for line in found)
    file.write_bytes(changed(("/srv/debian.iso", "/etc/shadow")))
    listen = 'listen="127.0.0.1"'
    for path, is_odd in (
        ("/etc/cron.d/x", True),
        ("/run/../etc/x", True),
        ("/run/web1.vnc", False),
    ):
        file.write_bytes(changed((listen, f'socket="{path}"')))
        told = brine("import", "--libvirt", file, "--dry-run")[2]
        assert (f"the socket of VNC is {path}, which is in no folder of sockets" in told) == is_odd
    file.write_bytes(changed(("/srv/debian.iso", "/etc/shadow")))
    shown = json.loads(brine("import", "--libvirt", file, "--dry-run", "--json")[1])["ignored"]
    assert "the guest can read /etc/shadow, which is in no folder of images" in shown


@pytest.mark.parametrize(
    ("path", "is_odd"),
    [
        ("/var/lib/libvirt/images/web1.raw", False),
        ("/var/lib/libvirt/qemu/domain-1-web1/master-key.aes", True),
        ("/var/lib/brine/config.data", True),
        ("/var/lib/ganeti/server.pem", True),
    ],
)
def test_the_state_of_a_program_is_no_folder_of_images(path: str, is_odd: bool) -> None:
    for data in ({"disks": [{"path": path}]}, {"cdroms": [path]}):
        assert bool([*importing.odd_places(data)]) == is_odd


def test_a_firmware_that_is_none_is_named(brine: Run, tmp_path: Path) -> None:
    file = tmp_path / "web1.xml"
    boot = DOMAIN[DOMAIN.index("<os ") : DOMAIN.index("</os>")]
    for path, is_odd in (("/etc/shadow", True), ("/usr/share/seabios/bios.bin", False)):
        hvm = f'<os><type>hvm</type><loader type="rom">{path}</loader>'
        file.write_bytes(changed((boot, hvm)))
        status, _, told = brine("import", "--libvirt", file, "--dry-run")
        assert status == 0, told
        said = f"the guest can read {path}, which is in no folder of images"
        assert (said in told) == is_odd


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
    lost = "devices/hostdev mode=subsystem type=pci"
    assert f"brine: warning: web2: no counterpart: {lost}" in warnings
    file.write_text("<domain")
    status, _, said = brine("import", "--libvirt", file)
    assert status == 1
    assert said.startswith(f"brine: error: {file}: is no XML: ")
    for arguments in ((), (tmp_path, "--libvirt", "-")):  # it takes one source
        assert brine("import", *arguments)[0] == 2
