"""A start of QEMU: checking and opening all that an instance needs, and becoming its QEMU.

No process of Brine's stays. All files are opened here, so a start that can't succeed fails before
QEMU exists, and QEMU inherits the descriptors. What QEMU itself refuses is undone by the unit's
last step.
"""

from __future__ import annotations

import contextlib
import fnmatch
import grp
import itertools
import json
import os
import pwd
import resource
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from brine.common import paths
from brine.common.background import begun
from brine.common.errors import install_hint, warn
from brine.common.files import open_regular, read_regular, write_whole
from brine.common.privileges import Capability, keep_for_programs, keep_only, may
from brine.common.uids import parse_uid_pool, request_unused_uid
from brine.instance import messages
from brine.instance.conflicts import refuse_in_use
from brine.instance.kvm.command_line import DiskFiles, Resources, TapFiles, qemu_args
from brine.instance.kvm.layout import Layout, layout_of
from brine.instance.kvm.programs import faults_of_writers, version_of
from brine.instance.store import InstanceError, clear_last_run, telling
from brine.instance.unit import UnitError, set_properties
from brine.vm.conflicts import claiming
from brine.vm.disk import Disk
from brine.vm.disk_files import Opened, opened
from brine.vm.files import InstanceFiles
from brine.vm.runtime_file import write_first
from brine.vm.spec import MACHINE_VERSIONS, QEMU_ITSELF_MIB, UEFI, SecurityModel, Spec, to_json
from brine.vm.unit_name import unit_of
from brine.vm.vif import Vif

EMPTY_ROOT = Path("/run/brine/empty")
"""The root directory of a confined QEMU."""

LONGEST_PASSWORD = 8
"""VNC's own limit: it ignores further characters."""

_KVM = Path("/dev/kvm")
_MOUNTS = Path("/proc/self/mounts")
_MODE = 0o600


def become_qemu(spec: Spec) -> NoReturn:
    """Prepare all that *spec* needs, and become its QEMU. An error leaves nothing behind."""
    confine_runner()
    layout = layout_of(spec)
    check_node(spec)
    limits_set = begun(partial(set_limits, spec))  # systemd works meanwhile
    with ExitStack() as stack:
        resources = open_resources(spec, stack)
        args = qemu_args(spec, layout, resources)
        limits_set()
        with claiming(partial(refuse_in_use, spec)):
            clear_last_run(spec.name)
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
    write_first(spec.name, to_json(spec), args, user, nics, disks)


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


def open_resources(spec: Spec, stack: ExitStack) -> Resources:
    """Open the files and devices of a spec, and connect its NICs; *stack* undoes all of it."""
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
    nics = _open_nics(spec, stack) if spec.nics else {}
    user = _user(spec, stack)
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
        text = f"{spec.name}: what it says is not logged: {error.filename}: {error.strerror}"
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


def _open_nics(spec: Spec, stack: ExitStack) -> dict[str, TapFiles]:
    # It takes long to load, and is for NICs only.
    from brine.hotplug.net.wiring import open_own_tap, unwire, wire

    nics = {}
    for each in spec.nics:
        nic = Vif.of(spec, each)
        tap = stack.enter_context(open_own_tap(nic))
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


# The confinement: a user, capabilities, and the limits of the control group.

# What preparing a QEMU needs; the unit has more, for Xen.
_RUNNERS = tuple(set(Capability) - {Capability.SYS_ADMIN})
# What QEMU needs to become another user, in another root directory.
_TO_BECOME_ANOTHER = (Capability.SETUID, Capability.SETGID, Capability.SYS_CHROOT)

_SET_BEFORE = Path("/run/systemd/system.control")

_MIGHTY_GROUPS = frozenset(
    {
        *("adm", "brine", "brine-kvmd", "dialout", "disk", "docker", "incus-admin", "input"),
        *("kmem", "libvirt", "lxd", "root", "shadow", "sudo", "systemd-journal", "tape", "tty"),
        "wheel",
    }
)
"""Groups that own devices, secrets or other VMs, or can become root."""


def confine_runner() -> None:
    """Give up the capabilities that preparing a QEMU does not need."""
    keep_for_programs(*_RUNNERS)
    keep_only(*_RUNNERS)


def confine_qemu(spec: Spec) -> None:
    """Leave to QEMU only the capabilities that it needs to become the guest's own user. A QEMU that
    stays root keeps those of this process."""
    if spec.security_model != SecurityModel.NONE:
        keep_for_programs(*_TO_BECOME_ANOTHER)


def set_limits(spec: Spec) -> None:
    """Set the limits of this process's unit, until the next boot."""
    addresses = _addresses_of(spec)
    limits = (spec.memory_max_mib, spec.cpu_limit_percent, spec.cpu_weight, spec.io_weight)
    were_set = (_SET_BEFORE / f"{unit_of(spec.name)}.d").exists()
    if not (any(limits) or addresses or were_set):
        return
    memory_max = f"{spec.memory_max_mib}M" if spec.memory_max_mib else "infinity"
    cpu_quota = f"{spec.cpu_limit_percent}%" if spec.cpu_limit_percent else ""
    properties = [  # systemd.resource-control(5)
        f"MemoryMax={memory_max}",
        f"MemorySwapMax={memory_max}",
        f"CPUQuota={cpu_quota}",
        f"CPUWeight={spec.cpu_weight or ''}",
        f"IOWeight={spec.io_weight or ''}",
        "IPAddressAllow=",  # a list that grows, so it is emptied first
    ]
    if addresses:
        properties.append(f"IPAddressAllow={addresses}")
    try:
        set_properties(spec.name, properties)
    except UnitError as error:
        raise InstanceError(spec.name, f"its limits can't be set: {error}") from error


def _addresses_of(spec: Spec) -> str:
    """The IP addresses that QEMU may talk with, as systemd writes them: those of VNC clients.

    The guest's own packets pass through its taps and do not count as QEMU's. With extra arguments
    all addresses are allowed, as their effect is not known.
    """
    if spec.extra_arguments:
        return "any"
    if not spec.vnc_bind or spec.vnc_bind.startswith("/"):
        return ""
    from ipaddress import ip_address  # few have VNC

    return "localhost" if ip_address(spec.vnc_bind).is_loopback else "any"


def _user(spec: Spec, stack: ExitStack) -> tuple[int, int] | None:
    """The ids of the user and the group that QEMU becomes; None if it stays root."""
    if spec.security_model == SecurityModel.NONE:
        return None
    if spec.security_model == SecurityModel.USER:
        try:
            user = pwd.getpwnam(spec.security_user)
        except KeyError:
            hint = f"useradd --system {spec.security_user}"
            text = f"there is no user {spec.security_user}"
            raise InstanceError(spec.name, text, hint=hint) from None
        _refuse_mighty(spec.name, user)
        return user.pw_uid, user.pw_gid
    uid = stack.enter_context(request_unused_uid(_uid_pool()))
    uid.hand_over()
    return uid.uid, uid.uid


def _refuse_mighty(name: str, user: pwd.struct_passwd) -> None:
    """Refuse a user with privileges that a guest must not get by breaking out. QEMU gets the user's
    primary group only."""
    if user.pw_uid == 0:
        raise InstanceError(name, "security_user must not be root")
    group = "root" if user.pw_gid == 0 else ""
    with contextlib.suppress(KeyError):  # a group without a name owns nothing that counts
        group = group or grp.getgrgid(user.pw_gid).gr_name
    if group in _MIGHTY_GROUPS:
        text = f"security_user must not be of the group {group}, as {user.pw_name} is"
        raise InstanceError(name, text, hint=f"useradd --system --user-group {name}")


def _uid_pool() -> list[list[int]]:
    """The node's own pool, or else the cluster's, or else the default pool."""
    from brine.config.ssconf import Ssconf, SsconfError  # few starts need these
    from brine.instance.settings import DEFAULT_UID_POOL, load_uid_pool

    if pool := load_uid_pool():
        return pool
    with contextlib.suppress(SsconfError):  # it is a node of no cluster
        if pool := Ssconf().uid_pool():
            return pool
    return parse_uid_pool(DEFAULT_UID_POOL)


# UEFI: the firmware of a machine, and the variables of each instance, made from a template.

FOLDERS = (Path("/etc/qemu/firmware"), Path("/usr/share/qemu/firmware"))
"""Folders of firmware descriptors; a file in an earlier folder replaces one of its name in a
later."""

# Features that need another machine than a spec describes, or that need enrolled keys.
_UNWANTED = {"requires-smm", "enrolled-keys", "amd-sev-es-only", "intel-tdx", "amd-sev-snp"}


def find_uefi(spec: Spec) -> tuple[Path, Path]:
    """The first firmware that fits a machine and does not need Secure Boot: its program, and the
    template of its variables."""
    files: dict[str, Path] = {}
    for folder in reversed(FOLDERS):
        with contextlib.suppress(OSError):
            files |= {name: folder / name for name in os.listdir(folder) if name.endswith(".json")}
    for _, file in sorted(files.items()):  # an empty file hides the one of its name
        try:
            found = _fitting(spec, json.loads(read_regular(file)))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # another program made it, and others may do
        if found and all(part.exists() for part in found):
            return found
    folders = " and ".join(map(str, FOLDERS))
    hint = install_hint(apt="ovmf", dnf="edk2-ovmf")
    raise InstanceError(
        spec.name,
        f"this node has no UEFI firmware for the machine {spec.machine}: none of {folders}",
        hint=f"{hint}, or have its spec name a firmware's image",
    )


def _fitting(spec: Spec, descriptor: dict[str, Any]) -> tuple[Path, Path] | None:
    """The firmware of a descriptor; None if it is not for this machine."""
    mapping = descriptor["mapping"]
    is_split = mapping["device"] == "flash" and mapping.get("mode", "split") == "split"
    if "uefi" not in descriptor["interface-types"] or not is_split:
        return None
    if _UNWANTED & set(descriptor["features"]):
        return None
    if not any(_is_for(spec, target) for target in descriptor["targets"]):
        return None
    code, variables = mapping["executable"], mapping["nvram-template"]
    if (code["format"], variables["format"]) != ("raw", "raw"):
        return None
    return Path(code["filename"]), Path(variables["filename"])


def _is_for(spec: Spec, target: dict[str, Any]) -> bool:
    program = Path(spec.qemu).name
    architecture = program.removeprefix("qemu-system-")
    # A QEMU of another name, such as kvm, emulates the node's own kind of processor.
    if architecture == program:
        architecture = os.uname().machine
    versions = MACHINE_VERSIONS.get(spec.machine)
    machine = f"{versions}0" if versions else spec.machine  # descriptors name all versions
    is_machine = any(fnmatch.fnmatchcase(machine, pattern) for pattern in target["machines"])
    return bool(target["architecture"] == architecture and is_machine)


@contextlib.contextmanager
def opened_variables(name: str, template: Path) -> Iterator[int]:
    """Open an instance's variables, for the time of the block, as a descriptor to read and write.

    :param template: the initial variables. Variables of another size belong to another firmware,
        and are refused.
    """
    file = InstanceFiles(name).uefi_variables
    with telling(name, f"{file}, or {template}: can't be used"):
        if not file.exists():
            paths.UEFI_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(file, read_regular(template), mode=_MODE, alone=True)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        size = template.stat().st_size
        descriptor = os.open(file, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise InstanceError(
                name,
                f"{file}: holds no variables of this firmware, which has {size} bytes of them",
                hint=f"move {file} away, and the next start makes new ones from {template}",
            )
        yield descriptor
    finally:
        os.close(descriptor)


def copy_variables(name: str, other: str) -> None:
    """Copy the UEFI variables of an instance, such as its boot order, to another, if there are
    any."""
    file = InstanceFiles(name).uefi_variables
    with telling(other, f"{file}: can't be copied"), contextlib.suppress(FileNotFoundError):
        variables = read_regular(file)
        write_whole(InstanceFiles(other).uefi_variables, variables, mode=_MODE, alone=True)
