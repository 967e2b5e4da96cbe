"""Listing storage units, and making and moving disks of a running guest, beside LVM and libvirt."""

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import libvirt, lvm, machine
from bench.harness import Plan, Report, Table, TableRow, in_turns, timed, timing
from lab.errors import LabError
from lab.guest import READY, run_order
from lab.progress import step
from lab.waiting import wait_for

LIST_LIMIT = 1.5
"""A list, beside `lvm fullreport`."""
ADD_LIMIT = 1.0
MOVE_LIMIT = 1.1
"""Both beside virsh."""

_LISTED = (200, 200, 20)
_MOVED_MIB = (1024, 1024, 64)
_GROUP_SIZE = 4 << 30
_NAME = "bench"
_SETTLE_S = 0.3
_LIMIT_S = 60.0
_SEES = "guest sees: "
# The line may lose characters, so it has each change three times.
_LOOP = (
    'while usleep 3000; do set -- /sys/block/vd*; [ "$*" = "$last" ] || { last=$*;'
    f' for i in 1 2 3; do echo "{_SEES}$* ."; done >/dev/ttyS0; }}; done'
)

_VOLUME_XML = """<volume><name>{name}</name><capacity unit='MiB'>{mib}</capacity>
<allocation>0</allocation><target><format type='raw'/></target></volume>
"""


def measure(plan: Plan) -> Report:
    """List units; then have two guests alike, Brine's and libvirt's, get a disk and move one."""
    machine.lead_own_group()
    listed, moved_mib = plan.pick(*_LISTED), plan.pick(*_MOVED_MIB)
    libvirt.prepare()
    with lvm.volume_group(libvirt.IMAGES / "lvm", _GROUP_SIZE):
        with step(f"making {listed} logical volumes"):
            _fill_group(listed)
        lines = timing({_FULL_REPORT: ["lvm", "fullreport"], **_LISTS})
        lists = in_turns("listing", plan.rounds, lines, warm_up=True)
    with _brine_guest() as ours, _libvirt_guest() as theirs:
        pairs: Mapping[str, Callable[[], float]]
        pairs = {_ADD: partial(_add_by_brine, ours), _VIRSH_ADD: partial(_add_by_virsh, theirs)}
        adds = in_turns("adding", plan.rounds, pairs, warm_up=True)
        with step(f"writing two disks of {moved_mib} MiB"):
            _add_large(ours, theirs, moved_mib)
        pairs = {_MOVE: _Moves().by_brine, _VIRSH_MOVE: _Moves().by_virsh}
        moves = in_turns("moving", plan.rounds, pairs)
    report = TableRow.of_times(_FULL_REPORT, lists[_FULL_REPORT])
    rows = [TableRow.of_times(name, lists[name]).beside(report, "LVM") for name in _LISTS]
    tables = [
        Table(f"{listed} logical volumes", [report, *(row.at_most(LIST_LIMIT) for row in rows)]),
        _beside("a disk of 64 MiB, until the guest sees it", adds, _ADD, _VIRSH_ADD, ADD_LIMIT),
        _beside(f"a disk of {moved_mib} MiB", moves, _MOVE, _VIRSH_MOVE, MOVE_LIMIT),
    ]
    heads = [*machine.description(*libvirt.VERSIONS_OF, "lvm2"), f"rounds: {plan.rounds}"]
    return Report(heads, tables, {**lists, **adds, **moves})


def _beside(
    title: str, samples: dict[str, list[float]], ours: str, theirs: str, limit: float
) -> Table:
    beside = TableRow.of_times(theirs, samples[theirs])
    return Table(
        title,
        [beside, TableRow.of_times(ours, samples[ours]).beside(beside, "virsh").at_most(limit)],
    )


# ---- lists

_FULL_REPORT = "lvm fullreport"
_LISTS = {
    "brine storage list": ["brine", "storage", "list"],
    "brine storage list --json": ["brine", "storage", "list", "--json"],
}


def _fill_group(count: int) -> None:
    # Without device-mapper they are in LVM's metadata only, which is what a report reads.
    how = ["--driverloaded", "n", "-an", "-Zn", "-Wn", "-l1"]
    for number in range(count):
        timed(["lvm", "lvcreate", "--quiet", *how, "--name", f"listed{number:03}", lvm.GROUP])


# ---- two guests alike

_FOLDERS = tuple(libvirt.IMAGES / name for name in ("units/one", "units/two"))
_POOL = libvirt.IMAGES / "pool"
_SERIAL = "<serial type='unix'><source mode='bind' path='{path}'/></serial>"


class _Guest:
    """A guest that tells on its serial line which disks it sees."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._heard = b""
        self._sees: str | None = None

    def begin(self) -> None:
        """Wait until it is ready, and have it tell."""
        deadline = time.monotonic() + _LIMIT_S
        while READY.encode() not in self._heard:
            self._line.sendall(b"\nhello\n")
            self._read(deadline)
        while self._sees is None:
            self._line.sendall(f"\n{run_order('look', _LOOP)}\n".encode())
            self._read(deadline)

    def wait(self, disk: str, *, there: bool) -> None:
        """Wait until it sees a disk such as ``vdb``, or sees it no more."""
        deadline = time.monotonic() + _LIMIT_S
        while (disk in (self._sees or "")) is not there:
            self._read(deadline)

    def _read(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise LabError(f"the guest says no more than {self._heard[-200:]!r}", hint="try again")
        with contextlib.suppress(TimeoutError):
            self._heard += self._line.recv(4096)
        for line in self._heard.decode(errors="replace").splitlines():
            if line.startswith(_SEES) and line.endswith(" ."):
                self._sees = line


@contextlib.contextmanager
def _guest_of(path: Path) -> Iterator[_Guest]:
    with socket.socket(socket.AF_UNIX) as line:
        wait_for(f"{path}", lambda: line.connect_ex(str(path)) == 0)
        line.settimeout(1)
        guest = _Guest(line)
        guest.begin()
        yield guest


@contextlib.contextmanager
def _brine_guest() -> Iterator[_Guest]:
    """An instance with all defaults, and two storage units."""
    for folder in _FOLDERS:
        folder.parent.mkdir(exist_ok=True)
        timed(["brine", "storage", "create", "file", str(folder)])
    spec = {
        "name": _NAME,
        "accel": "tcg",
        "machine": "pc",
        "memory_mib": libvirt.MEMORY_MIB,
        "kernel": f"{libvirt.GUEST}/kernel",
        "initrd": f"{libvirt.GUEST}/initramfs",
        "append": libvirt.APPEND,
        "shutdown_timeout": 1,
    }
    file = libvirt.IMAGES / "spec.json"
    file.write_text(json.dumps(spec), encoding="utf-8")
    timed(["brine", "instance", "define", str(file)], ["brine", "instance", "start", _NAME])
    with _guest_of(Path(f"/run/brine/ctrl/{_NAME}.serial")) as guest:
        machine.favour("qemu-system-x86_64")
        yield guest
    timed(["brine", "instance", "stop", "--force", _NAME])


@contextlib.contextmanager
def _libvirt_guest() -> Iterator[_Guest]:
    """libvirt's domain, and a pool of volumes."""
    _POOL.mkdir()
    file, serial = libvirt.IMAGES / "domain.xml", libvirt.SOCKETS / "serial"
    xml = libvirt.domain_xml(_NAME, _SERIAL.format(path=serial), qmp=None)
    file.write_text(xml, encoding="utf-8")
    timed(
        ["virsh", "--quiet", "pool-create-as", _NAME, "dir", "--target", str(_POOL)],
        ["virsh", "--quiet", "create", str(file)],
    )
    with _guest_of(serial) as guest:
        machine.favour("libvirtd", "virtlogd", "qemu-system-x86_64")
        yield guest
    timed(["virsh", "--quiet", "destroy", _NAME])


# ---- a disk for each

_ADD, _VIRSH_ADD = "brine disk add --size", "virsh vol-create + attach-disk"
_ADDED_MIB = 64


def _add_by_brine(guest: _Guest) -> float:
    words = ["--size", f"{_ADDED_MIB}M", "--unit", str(_FOLDERS[0]), "--name", "small"]
    began_at = time.perf_counter()
    timed(["brine", "disk", "add", _NAME, *words])
    guest.wait("vda", there=True)
    took_s = time.perf_counter() - began_at
    time.sleep(_SETTLE_S)
    timed(["brine", "disk", "remove", _NAME, "small", "--delete"])
    guest.wait("vda", there=False)
    return took_s


def _add_by_virsh(guest: _Guest) -> float:
    make, attach = _virsh_commands("small", _ADDED_MIB, "vda")
    began_at = time.perf_counter()
    timed(make, attach)
    guest.wait("vda", there=True)
    took_s = time.perf_counter() - began_at
    time.sleep(_SETTLE_S)
    timed(["virsh", "--quiet", "detach-disk", _NAME, "vda"])
    guest.wait("vda", there=False)
    timed(["virsh", "--quiet", "vol-delete", "small", "--pool", _NAME])
    return took_s


def _virsh_commands(name: str, mib: int, target: str) -> tuple[Sequence[str], Sequence[str]]:
    file = libvirt.IMAGES / f"{name}.xml"
    file.write_text(_VOLUME_XML.format(name=name, mib=mib), encoding="utf-8")
    make = ["virsh", "--quiet", "vol-create", _NAME, str(file)]
    how = ["--targetbus", "virtio", "--driver", "qemu", "--subdriver", "raw", "--cache", "none"]
    attach = ["virsh", "--quiet", "attach-disk", _NAME, str(_POOL / name), target, *how]
    return make, attach


# ---- and one that moves

_MOVE, _VIRSH_MOVE = "brine disk move", "virsh blockcopy --pivot"


def _add_large(ours: _Guest, theirs: _Guest, mib: int) -> None:
    words = ["--size", f"{mib}M", "--unit", str(_FOLDERS[0]), "--name", "large"]
    timed(["brine", "disk", "add", _NAME, *words], *_virsh_commands("large", mib, "vda"))
    for guest in (ours, theirs):
        guest.wait("vda", there=True)
    shown = subprocess.check_output(["brine", "disk", "status", _NAME, "--json"], text=True)
    (row,) = json.loads(shown)
    for path in (row["path"], _POOL / "large"):
        _write(Path(path), mib)


def _write(path: Path, mib: int) -> None:
    """Have an image be full of data, so that a copy copies all of it."""
    data = os.urandom(1 << 20)
    with open(path, "r+b", buffering=0) as image:
        image.writelines(data for _ in range(mib))
        os.fsync(image)


@dataclass
class _Moves:
    """Moves of the large disk to and fro."""

    number: int = 0

    def by_brine(self) -> float:
        self.number += 1
        return timed(["brine", "disk", "move", _NAME, "large", "--to", str(self._there(_FOLDERS))])

    def by_virsh(self) -> float:
        self.number += 1
        images = (_POOL / "large", libvirt.IMAGES / "copy")
        copy, original = self._there(images), images[(self.number + 1) % 2]
        how = ["--dest", str(copy), "--format", "raw", "--wait", "--pivot", "--transient-job"]
        began_at = time.perf_counter()
        timed(["virsh", "--quiet", "blockcopy", _NAME, "vda", *how])
        original.unlink()
        return time.perf_counter() - began_at

    def _there(self, places: Sequence[Path]) -> Path:
        return places[self.number % 2]
