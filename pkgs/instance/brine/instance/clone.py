"""Cloning an instance: another one that is the same, with disks of its own.

The clone has a new name, UUID, MAC addresses, paths of writable disks, and listening addresses.
Both share what is only read, such as CD-ROMs and backing files.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from brine.common import operation
from brine.common.cli import undo_when_told_to_end
from brine.common.errors import BrineError, UsageError, printable, warn
from brine.common.files import FileMark, new_file, open_safely, remove_same
from brine.common.operation import Facts, OperationKind, Work
from brine.instance import messages, store
from brine.instance.definition import print_spec
from brine.instance.disks.snapshots import CLONE_SNAPSHOT, take_of
from brine.instance.disks.volumes import as_made, make, remove_unused, telling
from brine.instance.kvm import uefi
from brine.instance.kvm.runtime_devices import with_hot_changes
from brine.instance.observe import Oper, look
from brine.instance.owner import remove_folder
from brine.instance.registry import Defined, define_instance, refuse_name, refuse_stray_vm
from brine.instance.store import InstanceError
from brine.storage.unit import StorageError
from brine.storage.volumes import volume_in
from brine.vm.disk import Disk
from brine.vm.spec import Spec, to_json
from brine.vm.values import address_fault, is_folder_unit, unit_fault

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DiskCopy:
    """A disk, and the path of the clone's copy; the size is rounded up."""

    source: str
    target: str
    size_mib: int


def clone(arguments: argparse.Namespace) -> int:
    undo_when_told_to_end()
    messages.log_to_journal("brine")

    def tell(copy: DiskCopy) -> None:
        text = f"copying {copy.source} to {copy.target}, {copy.size_mib} MiB ..."
        print(f"brine: {printable(text)}", file=sys.stderr, flush=True)

    source, name, dry_run = arguments.name, arguments.new_name, arguments.dry_run
    disks, addresses = dict(arguments.disk), dict(arguments.address)
    spec, copies, notes = clone_instance(
        source, name, disks, addresses, unit=arguments.unit, dry_run=dry_run, tell=tell
    )
    if arguments.json:
        rows = [asdict(one) for one in copies]
        print_spec(spec, dry_run=dry_run, source=source, disks=rows, notes=notes)
        return 0
    for note in notes:
        warn(f"{name}: {printable(note)}")
    if dry_run:
        for one in copies:
            text = f"would be copied: {one.source} to {one.target}, {one.size_mib} MiB"
            print(printable(text))
        print(f"would be cloned: {source} to {name}")
    else:
        print(f"cloned: {source} to {name}; brine instance start {name}")
    return 0


def clone_instance(
    source: str,
    name: str,
    disks: Mapping[str, str] = {},
    addresses: Mapping[str, str] = {},
    *,
    unit: str = "",
    dry_run: bool = False,
    tell: Callable[[DiskCopy], object] = lambda _: None,
) -> tuple[Spec, list[DiskCopy], list[str]]:
    """Clone *source* as the instance *name*, with copies of its disks. If it runs, they are copied
    from a snapshot, which LVM can take of a disk that is in use.

    Returns the clone's spec, the copies, and what it lacks, or shares with the original, in words.

    :param disks: the clone's path for each path of a disk. An unnamed file is copied beside the
        original. A target may be a block device, whose content is lost.
    :param addresses: the clone's MAC address for each of the original's.
    :param unit: the storage unit of the clone's volumes; empty is that of each original.
    :param tell: called for each copy before it begins.
    :raises BrineError: what failed. Then nothing is left, except on a block device.
    """
    if source == name:
        text = f"that is the name of the original: {name}"
        raise UsageError(text, hint="give the clone another one")
    if unit and (fault := unit_fault(unit)):
        raise UsageError(f"{unit!r:.60}: {fault}", hint="brine storage list shows the units")
    if not dry_run:
        store.settle_instance(name)
    with ExitStack() as lock, ExitStack() as snapshot:
        lock.enter_context(store.alone(source))
        spec, is_running = _source(source, disks)
        refuse_name(name)
        data, notes = _data_of(spec, name, addresses)
        copies = list(_copies(spec, name, disks))
        targets = {one.source: one.target for one in copies}
        for index, (disk, row) in enumerate(zip(spec.disks, data["disks"], strict=True)):
            if disk.path in targets:
                row |= {"path": targets[disk.path], "unit": "", "size_mib": 0}
            elif disk.unit and disk.read_only:
                row |= {"unit": "", "size_mib": 0}  # the volume stays the original's
            elif disk.unit:
                _give_volume(disk, row, index, unit)
        # An invalid definition fails before anything is copied.
        defined = define_instance(data, dry_run=True)
        volumes = dict(_volume_copies(spec, defined))
        copies += volumes
        if dry_run:
            return defined.spec, copies, notes
        known = {"name": name, "source": source, "uuid": defined.spec.uuid}
        originals = {disk.path: disk for disk in spec.disks}
        if is_running and volumes:
            copied = [originals[one.source] for one in volumes]
            taken, said = snapshot.enter_context(_snapshot(spec, copied))
            notes += said
            originals |= taken
            lock.close()  # the guest is not in the way of the copies, nor they in its
        with operation.begin(CLONE, store.operation_key(name), facts=known) as work:
            for number, one in enumerate(copies):
                work.progress(number / len(copies), f"{one.source} to {one.target}")
                tell(one)
                if target := volumes.get(one):
                    original = originals[one.source]
                    if original.unit:
                        volume_in(original.unit, original.uuid).prepare()
                    volume = make(work, defined.spec, target, undo="remove volume")
                    volume.copy_from(original, telling(work, one.size_mib * _MIB))
                else:
                    _copy(name, one, work)
            data = to_json(as_made(defined.spec, tuple(volumes.values())))
            work.step("define", undo=("undefine", known))
            rest = (("copy variables", known), ("tell", known))
            with work.committing(("is defined", known), *rest):
                defined = define_instance(data, is_new=True)
    return defined.spec, copies, notes


@contextlib.contextmanager
def _snapshot(spec: Spec, disks: Sequence[Disk]) -> Iterator[tuple[dict[str, Disk], list[str]]]:
    """Have a snapshot of disks for the time of the block. Yields its disks, by the paths of the
    originals, and notes. It is an operation on the original alone, which waits for no clone."""
    name = f"clone-{os.urandom(4).hex()}"
    rows = [{"unit": disk.unit, "uuid": disk.uuid} for disk in disks]
    facts: Facts = {"name": spec.name, "snapshot": name, "disks": rows}
    key = store.operation_key(spec.name)
    with operation.begin(SNAPSHOT_OF_SOURCE, key, facts=facts) as work:
        work.step(f"snapshot {name}", undo=("remove", facts))
        notes = take_of(spec, disks, name, is_running=True)
        yield {disk.path: _as_taken(disk, name) for disk in disks}, notes
        work.commit(("remove", facts))


def _as_taken(disk: Disk, snapshot: str) -> Disk:
    """A disk as it is in a snapshot."""
    for one in volume_in(disk.unit, disk.uuid).certain_status().snapshots:
        if one.name == snapshot:
            return replace(disk, path=one.path)
    raise StorageError(f"{disk.path}: its snapshot {snapshot} is gone")


def _remove_snapshot(facts: Facts) -> None:
    """Remove a snapshot, or warn that it stays: that keeps the original from nothing."""
    name, snapshot = facts["name"], facts["snapshot"]
    for row in facts["disks"]:
        try:
            volume_in(row["unit"], row["uuid"]).remove_snapshot(snapshot)
        except BrineError as error:
            text = f"{name}: a snapshot is left in {row['unit']}, and slows writes: {error}"
            warn(text, hint=f"brine disk snapshot {name} --remove {snapshot}")


def _give_volume(disk: Disk, row: dict[str, Any], index: int, unit: str) -> None:
    """Have a disk of the clone get a volume of its own, in a unit or in that of the original."""
    status = volume_in(disk.unit, disk.uuid).status()
    mib = max(disk.size_mib, -(-status.size // _MIB))
    del row["path"], row["uuid"], row["backing"]
    row |= {"name": disk.name or f"disk{index}", "size_mib": mib, "unit": unit or disk.unit}
    if not is_folder_unit(row["unit"]):
        row["format"] = "raw"  # a volume group has raw volumes only


def _volume_copies(spec: Spec, defined: Defined) -> Iterator[tuple[DiskCopy, Disk]]:
    """The disks of the clone that get volumes, by what is copied into each."""
    made = {disk.uuid for disk in defined.volumes.made}
    for disk, copy in zip(spec.disks, defined.spec.disks, strict=True):
        if copy.uuid in made:
            yield DiskCopy(disk.path, copy.path, copy.size_mib), copy


def _remove_copy(facts: Facts) -> None:
    mark = facts["mark"]
    path = Path(facts["path"])
    with contextlib.suppress(FileNotFoundError):  # its folder is gone, too
        remove_same(path, FileMark(*mark) if mark else None)


def _is_defined(facts: Facts) -> bool:
    spec = store.load_sound(facts["name"])
    return spec is not None and spec.uuid == facts["uuid"]


def _copy_variables(facts: Facts) -> None:
    if _is_defined(facts):
        uefi.copy_variables(facts["source"], facts["name"])


def _undefine(facts: Facts) -> None:
    """Remove what is left of a clone's definition that failed."""
    name = facts["name"]
    with store.alone(name):
        if not store.spec_file_of(name).exists():
            store.remove(name)
            remove_folder(name)


def _tell(facts: Facts) -> None:
    messages.tell(messages.CLONED, facts["name"], name=facts["source"])


CLONE = OperationKind(
    "clone",
    {
        "remove": _remove_copy,
        "remove volume": remove_unused,
        "is defined": _is_defined,
        "undefine": _undefine,
        "copy variables": _copy_variables,
        "tell": _tell,
    },
)

SNAPSHOT_OF_SOURCE = OperationKind(
    CLONE_SNAPSHOT, {"remove": _remove_snapshot}, alone=store.all_held
)


def _source(name: str, disks: Mapping[str, str]) -> tuple[Spec, bool]:
    """The original's spec, as its next start would have it, and whether it runs.

    :param disks: that are copied to a path.
    """
    seen = look(name)
    is_running = seen.state.oper is Oper.RUNNING
    if (oper := seen.state.oper) in (Oper.STARTING, Oper.STOPPING):
        raise InstanceError(name, f"is {oper}", hint="try again when that is done")
    if not is_running:
        refuse_stray_vm(name, "end it, then clone the instance: its disks change while it runs")
    spec = seen.spec
    if not spec.is_xen():
        with contextlib.suppress(InstanceError):  # its start tells the fault
            spec = with_hot_changes(spec)
    if is_running:
        _refuse_changing(spec, disks)
    return spec, is_running


def _refuse_changing(spec: Spec, disks: Mapping[str, str]) -> None:
    """Refuse disks that change while they are copied."""
    hint = f"brine instance stop {spec.name}, then clone it"
    if spec.is_xen():
        raise InstanceError(spec.name, "is a domain of Xen's, and runs", hint=hint)
    for disk in spec.disks:
        is_volume = disk.unit and not is_folder_unit(disk.unit)
        if disk.path in disks or not (disk.read_only or is_volume):
            text = f"runs, and its disk {disk.name or disk.path} changes while it is copied"
            hint += "; from a volume group to another volume a running one can be cloned, too"
            raise InstanceError(spec.name, text, hint=hint)


def _data_of(
    spec: Spec, name: str, addresses: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """The definition of the clone, without its disks' paths; and remarks."""
    for before, after in addresses.items():
        if fault := address_fault(after):
            raise UsageError(f"{name}: --address {before}={after}: {after} {fault}")
    data = {**to_json(spec), "name": name, "uuid": "", "claim_serial": 0}
    del data["admin_state"], data["admin_state_source"]
    notes = []
    for disk in data["disks"]:
        disk["uuid"] = ""
    for nic, row in zip(spec.nics, data["nics"], strict=True):
        row |= {"uuid": "", "mac": "", "ips": [addresses[ip] for ip in nic.ips if ip in addresses]}
        if lacks := [ip for ip in nic.ips if ip not in addresses]:
            if nic.mode == "routed":
                text = f"its routed NIC has the address {lacks[0]}, which the clone can't have, too"
                raise InstanceError(spec.name, text, hint=f"--address {lacks[0]}=ANOTHER")
            notes.append(f"the addresses of {spec.name}'s NIC {nic.mac} are not the clone's")
    if unknown := addresses.keys() - {one for nic in spec.nics for one in nic.ips}:
        text = f"{spec.name} has no address {', '.join(sorted(unknown))}"
        known = ", ".join(one for nic in spec.nics for one in nic.ips) or "none"
        raise UsageError(text, hint=f"its addresses are: {known}")
    if spec.vnc_bind.startswith("/"):
        data |= {"vnc_bind": "", "vnc_password_file": ""}
        notes.append(f"it has no VNC: the socket {spec.vnc_bind} is {spec.name}'s")
    elif spec.vnc_port:
        data["vnc_port"] = 0
        notes.append(f"its VNC takes a free port: {spec.vnc_port} is {spec.name}'s")
    if spec.extra_arguments:
        notes.append(f"its extra_arguments are {spec.name}'s: see whether both can have them")
    return data, notes


def _copies(spec: Spec, name: str, disks: Mapping[str, str]) -> Iterator[DiskCopy]:
    known = {disk.path for disk in spec.disks}
    if unknown := disks.keys() - known:
        paths = ", ".join(sorted(known)) or "none"
        text = f"{spec.name} has no disk {', '.join(sorted(unknown))}"
        raise UsageError(text, hint=f"its disks are: {paths}")
    for disk in spec.disks:
        given = disks.get(disk.path)
        if (disk.read_only or disk.unit) and given is None:
            continue  # both have it, or the clone gets a volume
        size, is_device = _size_of(spec.name, disk.path)
        size_mib = -(-size // _MIB)
        if given is None and is_device:
            text = f"{disk.path}: is a block device, and Brine makes none for the clone"
            hint = f"make one of {size_mib} MiB, and give --disk {disk.path}=DEVICE"
            raise InstanceError(spec.name, text, hint=hint)
        folder, file = os.path.split(disk.path)
        renamed = file.replace(spec.name, name, 1) if spec.name in file else f"{name}-{file}"
        target = os.path.abspath(given or os.path.join(folder, renamed))
        _check_target(name, target, size, is_named=given is not None)
        yield DiskCopy(disk.path, target, size_mib)


def _size_of(source: str, path: str) -> tuple[int, bool]:
    """The size of a disk in bytes, and whether it is a block device."""
    telling = store.telling(source, f"{path}: can't be opened")
    with telling, _opened(path, os.O_RDONLY) as descriptor:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            raise InstanceError(source, f"{path}: is neither a block device nor a file")
        return os.lseek(descriptor, 0, os.SEEK_END), stat.S_ISBLK(mode)


def _check_target(name: str, target: str, size: int, *, is_named: bool) -> None:
    """Refuse an existing target, unless it is a block device that is large enough."""
    if not os.path.lexists(target):
        if not os.path.isdir(folder := os.path.dirname(target)):
            raise InstanceError(name, f"{folder}: there is no such folder")
        return
    if not Path(target).is_block_device():
        other = "name another" if is_named else "say where the clone has that disk"
        hint = f"remove it, or {other}: --disk PATH=OTHER"
        raise InstanceError(name, f"{target}: is there already", hint=hint)
    there, _ = _size_of(name, target)
    if there < size:
        text = f"{target}: has {there // _MIB} MiB, and {-(-size // _MIB)} are needed"
        raise InstanceError(name, text)


def _copy(name: str, one: DiskCopy, work: Work) -> None:
    """Copy a disk. A file gets its name when it is complete; *work* removes it."""
    path = Path(one.target)
    telling = store.telling(name, f"{one.source}: can't be copied to {one.target}")
    with telling, _opened(one.source, os.O_RDONLY) as source:
        if os.path.lexists(one.target):
            with _opened(one.target, os.O_WRONLY | os.O_EXCL) as target:
                if not stat.S_ISBLK(os.fstat(target).st_mode):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                _run_cp(source, target, sparse="never")  # it is not empty
                os.fsync(target)
            return
        temporary = f".{work.record.id}.{len(work.record.steps)}.new"
        undo = {"path": str(path.with_name(temporary)), "mark": None}
        work.step(f"copy {one.source}", undo=("remove", undo))
        with new_file(path, temporary=temporary) as target:
            _run_cp(source, target, sparse="always")
            status = os.fstat(source)
            if stat.S_ISREG(status.st_mode):
                os.fchown(target, status.st_uid, status.st_gid)
                os.fchmod(target, status.st_mode & 0o777)
            os.fsync(target)
            mark = FileMark.of(os.fstat(target))
            work.step(f"name {path}", undo=("remove", {"path": str(path), "mark": mark}))


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    descriptor = open_safely(path, flags | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _run_cp(source: int, target: int, *, sparse: str) -> None:
    """Copy a file or device into an existing one; the blocks are shared if the file system can.

    :param source: an open descriptor, as *target* is, which cp opens anew: another user may give
        their names to other files meanwhile. cp inherits both, so a device stays taken if this
        process is killed.
    :param sparse: whether zeros become holes: ``always``, or ``never``.
    """
    files = [f"/proc/self/fd/{one}" for one in (source, target)]
    done = subprocess.run(
        ["cp", "--reflink=auto", f"--sparse={sparse}", "--", *files],
        env={**os.environ, "LC_ALL": "C"},
        pass_fds=(source, target),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = done.stderr.strip().rpartition(": ")[2]
        raise OSError(errno.EIO, reason or f"cp has ended with status {done.returncode}")
