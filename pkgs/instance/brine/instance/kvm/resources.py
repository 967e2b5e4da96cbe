"""A start of QEMU: checking and opening all that an instance needs, and becoming its QEMU.

No process of Brine's stays. All files are opened here, so a start that can't succeed fails before
QEMU exists, and QEMU inherits the descriptors. What QEMU itself refuses is undone by the unit's
last step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import stat
import time
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from brine.common.background import begun
from brine.common.errors import install_hint, warn
from brine.common.files import open_regular, read_regular
from brine.common.privileges import Capability, may
from brine.instance import messages
from brine.instance.conflicts import refuse_in_use
from brine.instance.kvm.command_line import DiskFiles, Resources, TapFiles, qemu_args
from brine.instance.kvm.confinement import confine_qemu, confine_runner, set_limits, user_of
from brine.instance.kvm.layout import Layout, layout_of
from brine.instance.kvm.moved_command import moved_command
from brine.instance.kvm.programs import faults_of_writers, version_of
from brine.instance.kvm.uefi import find_uefi, opened_variables
from brine.instance.store import InstanceError, clear_last_run, telling
from brine.vm.address import DeviceKind
from brine.vm.conflicts import identities_lock
from brine.vm.disk import Disk, without_empty
from brine.vm.disk_files import Opened, opened
from brine.vm.files import InstanceFiles
from brine.vm.markers import MarkerKind, this_run, write_marker
from brine.vm.runtime_file import Runtime, write_first
from brine.vm.spec import QEMU_ITSELF_MIB, UEFI, SecurityModel, Spec, to_json
from brine.vm.unit_name import unit_of
from brine.vm.values import USUAL_MTU, Mode
from brine.vm.vif import Vif

EMPTY_ROOT = Path("/run/brine/empty")
"""The root directory of a confined QEMU."""

LONGEST_PASSWORD = 8
"""VNC's own limit: it ignores further characters."""

_KVM = Path("/dev/kvm")
_MOUNTS = Path("/proc/self/mounts")
_MODE = 0o600


def become_qemu(spec: Spec, awaited: Runtime | None = None) -> NoReturn:
    """Prepare all that *spec* needs, and become its QEMU. An error leaves nothing behind.

    :param awaited: of the QEMU whose guest this one waits for, with the paths of this node; None
        begins anew.
    """
    confine_runner()
    layout = layout_of(spec) if awaited is None else Layout()
    check_node(spec)
    limits_set = begun(partial(set_limits, spec))  # systemd works meanwhile
    with ExitStack() as stack:
        resources = open_resources(spec, stack, is_reachable=awaited is None)
        if awaited:
            args = moved_command(awaited, spec, resources)
        else:
            args = qemu_args(spec, layout, resources)
        limits_set()
        with identities_lock(partial(refuse_in_use, spec)):
            clear_last_run(spec.name)
            if awaited:
                write_marker(MarkerKind.AWAITS, spec.name, run=this_run(), node=spec.node)
                _write_moved(spec, awaited, resources, args)
            else:
                _write_runtime(spec, layout, resources, args)
        if spec.security_model == SecurityModel.POOL and resources.user:
            messages.tell(messages.UID_GIVEN, spec.name, uid=resources.user[0])
        confine_qemu(spec)
        os.execv(spec.qemu, args)


def _write_runtime(spec: Spec, layout: Layout, given: Resources, args: list[str]) -> None:
    disks = []
    for each in spec.disks:
        if slot := layout.disks.get(each.uuid):
            disks.append(each.entry(given.disks[each.uuid].size_mib, slot))
    nics = [Vif.of(spec, nic).recorded(layout.nics[nic.uuid]) for nic in spec.nics]
    user = given.user[0] if given.user else None
    write_first(spec.name, {**to_json(spec), **_devices_of(spec)}, args, user, nics, disks)


def _write_moved(spec: Spec, awaited: Runtime, given: Resources, args: list[str]) -> None:
    """What the guest was started with, and has now, is as on the other node. The devices that it
    has now are those of the start here: what is plugged or unplugged later differs from them.

    :param spec: with the devices of now.
    """
    user = given.user[0] if given.user else None
    nics, disks = (list(awaited.devices[kind]) for kind in (DeviceKind.NIC, DeviceKind.DISK))
    started = {**(awaited.started_with() or {}), **_devices_of(spec)}
    write_first(spec.name, started, args, user, nics, disks)


def _devices_of(spec: Spec) -> dict[str, Any]:
    """The disks and NICs of a spec, as runtime files have those of the start."""
    rows = {"disks": spec.disks, "nics": spec.nics}
    return {key: [without_empty(to_json(one)) for one in rows[key]] for key in rows}


def check_node(spec: Spec) -> None:
    """Refuse to start an instance that this node can't run."""
    name = spec.name
    if not (os.path.isfile(spec.qemu) and os.access(spec.qemu, os.X_OK)):
        hint = install_hint(apt="qemu-system-x86", dnf="qemu-system-x86")
        hint += ", or have its spec name another program"
        raise InstanceError(name, f"{spec.qemu}: there is no such program", hint=hint)
    for _, fault in faults_of_writers(spec):
        raise InstanceError(name, fault)
    if spec.accel == "kvm" and not _KVM.exists():
        hint = (
            'see whether the firmware has virtualization enabled; "accel": "tcg" does without, and '
            'so does "kvm_flag": "disabled" in hvparams of the cluster\'s configuration'
        )
        raise InstanceError(name, f"this node has no {_KVM}", hint=hint)
    with ExitStack() as stack:
        _open_boot_files(spec, stack)
    if folder := spec.huge_pages:
        rows = [line.split() for line in _MOUNTS.read_text(errors="surrogateescape").splitlines()]
        types = [row[2] for row in rows if row[1] == folder.rstrip("/")]
        if types[-1:] != ["hugetlbfs"]:  # QEMU would make a file there, without huge pages
            hint = f"mount -t hugetlbfs none {folder}"
            raise InstanceError(name, f"{folder}: no hugetlbfs is mounted there", hint=hint)
    if spec.memory_lock:
        _allow_locked_memory(spec)
    _refuse_no_socket(spec)
    if spec.vnc_password_file:
        read_password(spec)  # or it says why not


def _refuse_no_socket(spec: Spec) -> None:
    """Refuse a file in the place of VNC's socket: QEMU, which is root then, would remove it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if spec.vnc_bind.startswith("/") and not stat.S_ISSOCK(os.lstat(spec.vnc_bind).st_mode):
            raise InstanceError(spec.name, f"{spec.vnc_bind}: is there already, and is no socket")


def _allow_locked_memory(spec: Spec) -> None:
    """Let QEMU lock all of its memory: the kernel's own limit, 8 MiB, would end it.

    Root may exceed that limit, but QEMU becomes another user.
    """
    with contextlib.suppress(OSError, ValueError):  # the limit as it is may do
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, unlimited)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needed = spec.memory_mib + QEMU_ITSELF_MIB << 20
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return
    if spec.security_model == SecurityModel.NONE and may(Capability.IPC_LOCK):
        return
    raise InstanceError(
        spec.name,
        f"memory_lock takes {needed >> 20} MiB, and {limit >> 20} MiB may be locked",
        hint=f"systemctl edit {unit_of(spec.name)}, with [Service] and LimitMEMLOCK=infinity",
    )


def read_password(spec: Spec) -> str:
    """The password of VNC, the first line of the spec's file. It goes to QEMU and nowhere else."""
    file = Path(spec.vnc_password_file)
    try:
        with telling(spec.name, f"{file}: can't be read"):
            password = (
                read_regular(file, safely=True).decode().replace("\r\n", "\n").partition("\n")[0]
            )
    except UnicodeDecodeError:
        raise InstanceError(spec.name, f"{file}: is no text") from None
    if not 0 < len(password.encode()) <= LONGEST_PASSWORD:
        text = f"{file}: a VNC password has 1 to {LONGEST_PASSWORD} bytes"
        raise InstanceError(spec.name, text)
    if not password.isprintable():
        raise InstanceError(spec.name, f"{file}: has characters that can't be typed")
    return password


# Opening files and devices.


class _FileSets:
    """Sets of open descriptors, which QEMU inherits.

    :param stack: closes them.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._numbers = itertools.count()

    def open(self, disk: Disk) -> DiskFiles:
        """Open a disk, with its backing files."""
        return self._set(self._stack.enter_context(opened(disk)))

    def of(self, descriptor: int) -> DiskFiles:
        """A set of one file."""
        return DiskFiles(next(self._numbers), _inherited([descriptor]))

    def _set(self, files: Opened) -> DiskFiles:
        number = next(self._numbers)
        backing = tuple(map(self._set, files.backing))
        descriptors = _inherited(files.descriptors)
        return DiskFiles(number, descriptors, files.is_device, backing, files.size_mib)


def open_resources(spec: Spec, stack: ExitStack, *, is_reachable: bool = True) -> Resources:
    """Open the files and devices of a spec, and connect its NICs; *stack* undoes all of it.

    :param is_reachable: False if another node has its guest: routes to that stay as they are.
    """
    is_confined = spec.chroot or spec.security_model != SecurityModel.NONE
    # QEMU answers meanwhile: to load it takes longer than most of what follows.
    version = begun(partial(version_of, spec)) if is_confined else lambda: (0, 0)
    files = _FileSets(stack)
    disks = {each.uuid: files.open(each) for each in spec.disks}
    cdroms = [files.open(medium(path)) if path else None for path in spec.cdroms]
    uefi = None
    if spec.firmware == UEFI:
        code, template = find_uefi(spec)
        variables = opened_variables(spec.name, template)
        uefi = (files.open(medium(code)), files.of(stack.enter_context(variables)))
    console_log = _open_console_log(spec, files, stack) if spec.serial_console else None
    nics = _open_nics(spec, stack, is_reachable=is_reachable) if spec.nics else {}
    user = user_of(spec, stack)
    if spec.chroot:
        EMPTY_ROOT.mkdir(mode=0o555, parents=True, exist_ok=True)
    return Resources(
        disks=disks,
        nics=nics,
        cdroms=cdroms,
        boot=_open_boot_files(spec, stack),
        console_log=console_log,
        uefi=uefi,
        user=user,
        root=EMPTY_ROOT if spec.chroot else None,
        version=version(),
    )


def medium(path: str | Path) -> Disk:
    """A file that QEMU only reads."""
    return Disk(path=str(path), cache="writeback", read_only=True)


def _open_boot_files(spec: Spec, stack: ExitStack) -> dict[str, int]:
    """Open what the guest boots from, beside disks: descriptors by the spec's keys."""
    found = {}
    for key in ("firmware", "kernel", "initrd"):
        if (file := getattr(spec, key)) in ("", UEFI):
            continue
        with telling(spec.name, f"{file}: can't be read"):
            # QEMU would wait for a FIFO's writer.
            descriptor = open_regular(file, safely=True)
        stack.callback(os.close, descriptor)
        (found[key],) = _inherited([descriptor])
    return found


def _open_console_log(spec: Spec, files: _FileSets, stack: ExitStack) -> DiskFiles | None:
    """The pipe of the log of its serial line; None if there can be none."""
    try:
        writer = open_pipe(spec.name)
    except OSError as error:
        text = f"{spec.name}: its console is not logged: {error.filename}: {error.strerror}"
        warn(text, program="brine-instance")
        return None
    stack.callback(os.close, writer)
    return files.of(writer)


def open_pipe(name: str) -> int:
    """Open the pipe of an instance's serial line; returns a descriptor for writing."""
    pipe = InstanceFiles(name).console_pipe
    pipe.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (os.path.lexists(pipe) and stat.S_ISFIFO(pipe.lstat().st_mode)):
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, _MODE)
    flags = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    # Without a reader, a pipe can't be opened for writing only.
    both = os.open(pipe, os.O_RDWR | flags)
    try:
        writer = os.open(pipe, os.O_WRONLY | flags)
        now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        # A full pipe is that of a reader that has stalled, and is about to be ended.
        with contextlib.suppress(BlockingIOError):
            os.write(writer, f"\r\n--- {name} starts, {now} ---\r\n".encode())
    finally:
        os.close(both)
    return writer


def _open_nics(spec: Spec, stack: ExitStack, *, is_reachable: bool) -> dict[str, TapFiles]:
    # It takes long to load, and is for NICs only.
    from brine.hotplug.net.wiring import check_wiring, open_own_tap, unwire, wire

    nics = {}
    for each in spec.nics:
        nic = Vif.of(spec, each)
        tap = stack.enter_context(open_own_tap(nic))
        if nic.mode == Mode.ROUTED and not is_reachable:
            check_wiring(nic)
            mtu = nic.mtu or USUAL_MTU
        else:
            mtu = wire(tap, nic).mtu
            stack.callback(unwire, tap.name)
        nics[each.uuid] = TapFiles(_inherited(tap.queues), _inherited(tap.vhost), mtu)
    return nics


def _inherited(descriptors: Iterable[int]) -> tuple[int, ...]:
    """Descriptors that stay open when this process becomes QEMU."""
    numbers = tuple(descriptors)
    for number in numbers:
        os.set_inheritable(number, True)
    return numbers
