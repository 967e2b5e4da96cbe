"""The disks and NICs of a libvirt domain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from brine.common.errors import BrineError
from brine.instance.foreign.fitting import NO_BRIDGE_HINT, number_of
from brine.instance.foreign.parts import Part
from brine.vm.disk import MOST_BACKING
from brine.vm.values import AIO_MODES, CACHE_MODES, FORMATS, MODELS

_INTERFACES = {"virtio": "virtio", "scsi": "scsi", "ide": "ide", "sata": "ide", "xen": "virtio"}
# The buses that libvirt takes if none is given: the names of the guest's devices begin so.
_BUS_OF_NAME = {"hd": "ide", "sd": "scsi", "vd": "virtio", "xv": "xen"}
_MODELS = {name: name for name in MODELS} | {
    "virtio-transitional": "virtio",
    "virtio-non-transitional": "virtio",
    "netfront": "virtio",
}


@dataclass
class LibvirtDomain:
    """A domain on its way to a spec.

    :param link: the bridge for NICs that are on no bridge.
    :param storages: the folder of each storage pool, by name.
    :param named: lines about what has no counterpart.
    :param boots: the devices with a place in the boot order: it, the kind, and the index.
    """

    root: Part
    link: str
    storages: Mapping[str, str]
    named: list[str]
    data: dict[str, Any] = field(default_factory=dict)
    boots: list[tuple[int, str, int]] = field(default_factory=list)

    def is_kvm(self) -> bool:
        return bool(self.data["hypervisor"] == "kvm")

    def note_boot(self, device: Part, kind: str, index: int) -> None:
        """Note the place of a device in the boot order."""
        if boot := device.first("boot"):
            order = boot.get("order")
            if order.isascii() and order.isdecimal():
                self.boots.append((int(order[:9]), kind, index))
            else:
                boot.lose()


# Disks.


def read_disks(domain: LibvirtDomain) -> None:
    """Read the disks and CD-ROMs."""
    domain.data["disks"], domain.data["cdroms"] = [], []
    for disk in domain.root.all("devices/disk"):
        target, kind = disk.first("target"), disk.get("device") or "disk"
        disk.label(target.get("dev"))
        source = disk.first("source")
        path = _path(domain, source)
        if kind == "cdrom":
            _cdrom(domain, disk, source, path)
        elif kind in ("disk", "lun") and path and not _is_covered(source, disk):
            if kind == "lun":
                disk.lose("device", "the guest sees a plain disk")
            disk.expect("type", "file", "block", "volume")
            domain.note_boot(disk, "disk", len(domain.data["disks"]))
            domain.data["disks"].append(_disk(domain, disk, path))
        else:
            disk.lose(why="the guest does not have it")


def _cdrom(domain: LibvirtDomain, disk: Part, source: Part, path: str) -> None:
    disk.expect("type", "file", "block", "volume")
    if source and not path:
        source.lose(why="the drive is empty")
    driver, target = disk.first("driver"), disk.first("target")
    driver.expect("name", "qemu")
    driver.expect("type", "raw")
    target.expect("bus", "ide", "sata")  # the drive of each machine is an IDE one
    target.expect("tray", "closed", *([] if path else ["open"]))
    disk.first("readonly")
    if end := disk.first("backingStore"):
        end.skip()
    domain.note_boot(disk, "cdrom", len(domain.data["cdroms"]))
    domain.data["cdroms"].append(path)


def _path(domain: LibvirtDomain, source: Part) -> str:
    """The file or device of a disk or backing file; empty if it is neither."""
    source.get("index")  # of a running domain
    path = source.get("file") or source.get("dev")
    pool, volume = source.get("pool"), source.get("volume")
    if pool and volume and (folder := domain.storages.get(pool)):
        path = path or f"{folder}/{volume}"
    return path


def _is_covered(source: Part, disk: Part) -> bool:
    """Whether the guest sees something else than the content of the file."""
    parts = [source.first("encryption"), source.first("slices"), disk.first("encryption")]
    return any(parts)


def _disk(domain: LibvirtDomain, disk: Part, path: str) -> dict[str, Any]:
    if disk.first("transient"):
        raise BrineError(
            f"the disk {path} is transient, and Brine would keep what the guest writes",
            hint="leave <transient/> out, and name a copy of the image",
        )
    found: dict[str, Any] = {"path": path} | _driver(disk, path)
    target = disk.first("target")
    bus = target.get("bus") or _BUS_OF_NAME.get(target.get("dev")[:2], "virtio")
    has_sata = "q35" in domain.data.get("machine", "")  # where it is what a spec calls ide
    if bus not in _INTERFACES or (bus == "sata" and not has_sata):
        target.lose("bus", f"the spec has {_INTERFACES.get(bus, 'virtio')}")
    if (interface := _INTERFACES.get(bus, "virtio")) != "virtio" and domain.is_kvm():
        found["interface"] = interface
    disk.expect("model", "virtio", "virtio-transitional", "virtio-non-transitional")
    disk.expect("snapshot", "internal")
    if disk.first("readonly"):
        found["read_only"] = True
    if serial := disk.first("serial").text():
        found["serial"] = serial
    return found | _backing(domain, disk)


def _driver(disk: Part, path: str) -> dict[str, Any]:
    driver, found = disk.first("driver"), dict[str, Any]()
    driver.expect("name", "qemu", "phy", "file", "tap", "tap2")
    found["format"] = driver.get("type") or "raw"
    if found["format"] == "aio":  # Xen's name of it
        found["format"] = "raw"
    if found["format"] not in FORMATS:
        hint = f"qemu-img convert -O qcow2 {path} NEW, and have the definition name that"
        raise BrineError(f"{path} is an image of the format {found['format']}", hint=hint)
    if cache := driver.choice("cache", {one: one for one in CACHE_MODES} | {"default": ""}):
        found["cache"] = cache
    if aio := driver.choice("io", {one: one for one in AIO_MODES}):
        found["aio"] = aio
    driver.expect("discard", "unmap", "ignore")
    if driver.get("discard") == "ignore":
        found["discard"] = False
    driver.expect("error_policy", "enospace")
    return found


def _backing(domain: LibvirtDomain, image: Part) -> dict[str, Any]:
    """The backing file of a disk, with those behind it. A warning names other kinds of storage."""
    chain: list[dict[str, Any]] = []
    while store := image.first("backingStore"):
        path, kind = _path(domain, store.first("source")), store.first("format")
        store.get("index")  # of a running domain
        if not path:
            if store.first("source"):
                store.lose()
            break  # the end of a chain
        if len(chain) == MOST_BACKING:
            raise BrineError(f"a disk has more than {MOST_BACKING} backing files")
        store.expect("type", "file", "block", "volume")
        chain.append({"path": path, "format": kind.get("type") or "raw"})
        image = store
    inner: dict[str, Any] = {}
    for one in reversed(chain):
        inner = {"backing": one | inner}
    return inner


# NICs.


def read_nics(domain: LibvirtDomain) -> None:
    """Read the NICs."""
    domain.data["nics"] = []
    for index, interface in enumerate(domain.root.all("devices/interface")):
        interface.label(interface.first("mac").get("address"))
        domain.note_boot(interface, "network", index)
        domain.data["nics"].append(_nic(domain, interface))


def _nic(domain: LibvirtDomain, interface: Part) -> dict[str, Any]:
    nic: dict[str, Any] = {"mac": interface.first("mac").get("address")}
    nic["link"] = _link(domain, interface)
    port = interface.first("virtualport")
    if port.get("type") == "openvswitch":
        nic["mode"] = "openvswitch"
    elif port:
        port.lose()
    nic["vlan"] = _vlan(interface.first("vlan"))
    model = interface.first("model")
    nic["model"] = model.choice("type", _MODELS, "the spec has virtio")
    if not nic["model"]:
        # Where a definition names none, libvirt takes the latter.
        nic["model"] = "virtio" if model.get("type") or not domain.is_kvm() else "rtl8139"
    if size := interface.first("mtu").get("size"):
        nic["mtu"] = number_of(size, "mtu")
    driver = interface.first("driver")
    if queues := driver.get("queues"):
        nic["queues"] = number_of(queues, "queues")
    driver.expect("name", "vhost", "qemu")
    if driver.get("name") == "vhost":
        nic["vhost"] = True
    interface.first("link").expect("state", "up")
    tap = interface.first("target").get("dev")
    if tap and not tap.startswith(("vnet", "vif", "tap")):
        interface.first("target").lose(why="Brine chooses the name of the tap")
    interface.first("script").expect("path", "vif-bridge")
    return {key: value for key, value in nic.items() if value}


def _link(domain: LibvirtDomain, interface: Part) -> str:
    """The bridge of a NIC."""
    kind, source = interface.get("type"), interface.first("source")
    bridge = source.get("bridge")
    if kind == "bridge" and bridge:
        return bridge
    mac = interface.first("mac").get("address")
    names = ("network", "dev", "name", "path")
    given = next((value for name in names if (value := source.get(name))), "")
    if not domain.link:
        what = f"{kind} {given}".rstrip()
        raise BrineError(f"the NIC {mac} is on no bridge, but of the {what}", hint=NO_BRIDGE_HINT)
    interface.lose("type", f"it is on {domain.link}")
    if source:
        source.lose()
    return domain.link


def _vlan(vlan: Part) -> str:
    """The VLANs, in Ganeti's notation: ``42``, ``:42:43``, ``.42:43``."""
    native, tagged = "", []
    tags = vlan.all("tag")
    vlan.expect("trunk", "yes", "no")
    for tag in tags:
        mode = tag.choice("nativeMode", {"untagged": "untagged", "tagged": "tagged"})
        if mode == "tagged":
            tag.lose("nativeMode", "frames without a tag are not in this VLAN")
        if mode == "untagged" and not native:
            native = tag.get("id")
        else:
            tagged.append(tag.get("id"))
    if not tags:
        return ""
    if vlan.get("trunk") != "yes" and len(tags) == 1:
        return native or tagged[0]
    return (f".{native}" if native else "") + "".join(f":{one}" for one in tagged)
