"""Opening what an instance's QEMU needs: disks, taps, firmware, a user id, a VNC password.

Everything is opened here first. So a start that can't succeed fails before QEMU exists, and QEMU
inherits the descriptors: this process becomes QEMU.
"""

from __future__ import annotations

import contextlib
import fnmatch
import grp
import itertools
import json
import os
import pwd
import re
import resource
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brine.common import paths
from brine.common.files import read_regular, write_whole
from brine.common.paths import InstanceFiles
from brine.common.peer import unit_of
from brine.hotplug.choices import Mode
from brine.hotplug.disk import Disk, Opened, opened
from brine.instance.devices import disk_of, nic_of
from brine.instance.kvm.command_line import DiskFiles, NicFiles, QemuUser, Resources, UefiFiles
from brine.instance.serial_log import open_pipe
from brine.instance.spec import UEFI, FormatSource, SecurityModel, Spec, backing_chain
from brine.instance.store import InstanceError

if TYPE_CHECKING:
    pass


# VNC passwords, which go from a file of the instance's over QMP to its QEMU, and nowhere else.

LONGEST_PASSWORD = 8
"""VNC's own limit: it ignores further characters."""


def read_password(spec: Spec) -> str:
    """The password of an instance, the first line of its file.

    :raises InstanceError: if it can't be read.
    """
    file = Path(spec.vnc_password_file)
    try:
        text = read_regular(file).decode().replace("\r\n", "\n")
        password = text.partition("\n")[0]
    except OSError as error:
        raise InstanceError(spec.name, f"{file}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise InstanceError(spec.name, f"{file}: is no text") from None
    if not 0 < len(password.encode()) <= LONGEST_PASSWORD:
        text = f"{file}: a VNC password has 1 to {LONGEST_PASSWORD} bytes"
        raise InstanceError(spec.name, text)
    if not password.isprintable():
        raise InstanceError(spec.name, f"{file}: has characters that can't be typed")
    return password


# What an instance needs on its node, checked before anything is changed.

_KVM = Path("/dev/kvm")
_MOUNTS = Path("/proc/self/mounts")
_STATUS = Path("/proc/self/status")
_INTERFACES = Path("/sys/class/net")
_CAP_IPC_LOCK = 14
_QEMU_ITSELF_MIB = 256  # beside the guest's memory; it grows with the devices


def check_node(spec: Spec) -> None:
    """Refuse to start an instance that this node can't run.

    :raises InstanceError: what the node lacks.
    """
    name = spec.name
    if not os.access(spec.qemu, os.X_OK):
        hint = "apt install qemu-system-x86, or have its spec name another program"
        raise InstanceError(name, f"{spec.qemu}: there is no such program", hint=hint)
    if spec.accel == "kvm" and not _KVM.exists():
        hint = 'see whether the firmware has virtualization enabled; "accel": "tcg" does without'
        raise InstanceError(name, f"this node has no {_KVM}", hint=hint)
    for text in (spec.firmware, spec.kernel, spec.initrd):
        if text and text != UEFI:
            _check_file(name, Path(text))
    # Without it, QEMU would make a file of that name, without huge pages.
    if spec.huge_pages and not _is_hugetlbfs(spec.huge_pages):
        hint = f"mount -t hugetlbfs none {spec.huge_pages}"
        raise InstanceError(name, f"{spec.huge_pages}: no hugetlbfs is mounted there", hint=hint)
    if spec.memory_lock:
        _check_locked_memory(spec)
    if spec.vnc_password_file:
        read_password(spec)  # or it says why not


def missing_paths_of(spec: Spec) -> list[str]:
    """The missing files, devices and bridges of an instance, as paths."""
    disks = [disk.path for disk in spec.disks]
    backing = [each.path for disk in spec.disks for each in backing_chain(disk)]
    others = [spec.firmware, spec.kernel, spec.initrd, *spec.cdroms]
    paths = [path for path in (*disks, *backing, *others) if path.startswith("/")]
    return [path for path in paths if not os.path.exists(path)] + missing_bridges_of(spec)


def missing_bridges_of(spec: Spec) -> list[str]:
    """The missing bridges of an instance, as paths below */sys*."""
    links = [nic.link for nic in spec.nics if nic.link and nic.mode != Mode.ROUTED]
    return [str(_INTERFACES / link) for link in links if not (_INTERFACES / link).exists()]


def _check_file(name: str, file: Path) -> None:
    if not os.access(file, os.R_OK):
        raise InstanceError(name, f"{file}: can't be read, or is not there")
    if not file.is_file():  # QEMU would wait for a FIFO's writer
        raise InstanceError(name, f"{file}: is no file")


def _check_locked_memory(spec: Spec) -> None:
    """Refuse a start that would exceed the kernel's limit of locked memory, which would end QEMU.

    Root may exceed that limit, but QEMU becomes another user.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needed = spec.memory_mib + _QEMU_ITSELF_MIB << 20
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return
    if spec.security_model == SecurityModel.NONE and _may_lock():
        return
    unit = unit_of(spec.name)
    raise InstanceError(
        spec.name,
        f"memory_lock takes {needed >> 20} MiB, and {limit >> 20} MiB may be locked",
        hint=f"systemctl edit {unit}, with [Service] and LimitMEMLOCK=infinity",
    )


def _may_lock() -> bool:
    """Whether this process has CAP_IPC_LOCK (:manpage:`capabilities(7)`)."""
    lines = _STATUS.read_text(errors="replace").splitlines()
    effective = [line.split()[1] for line in lines if line.startswith("CapEff:")]
    return bool(effective) and bool(int(effective[0], 16) >> _CAP_IPC_LOCK & 1)


def _is_hugetlbfs(path: str) -> bool:
    rows = (line.split() for line in _MOUNTS.read_text(errors="surrogateescape").splitlines())
    found = [row[2] for row in rows if row[1] == path.rstrip("/")]
    return bool(found) and found[-1] == "hugetlbfs"


EMPTY_ROOT = Path("/run/brine/empty")
"""The root directory of a confined QEMU."""

_MIGHTY_GROUPS = frozenset(
    {
        *("adm", "brine", "brine-kvmd", "dialout", "disk", "docker", "incus-admin", "input"),
        *("kmem", "libvirt", "lxd", "root", "shadow", "sudo", "systemd-journal", "tape", "tty"),
        "wheel",
    }
)
"""Groups that own devices, secrets or other VMs, or can become root."""

_VERSION = re.compile(r"version (\d+)\.(\d+)")
_VERSION_TIMEOUT_S = 20


def open_resources(spec: Spec, stack: ExitStack) -> tuple[Resources, dict[str, int]]:
    """Open the files and devices of a spec, and connect its NICs.

    :param stack: closes and undoes all of it.
    :returns: the descriptors, and the sizes of the disks in MiB, by UUID.
    :raises BrineError: what is missing. *stack* undoes what was done.
    """
    disks, sizes, numbers = {}, {}, itertools.count()
    for each in spec.disks:
        files = stack.enter_context(
            opened(disk_of(each), is_format_said=each.format_source != FormatSource.DEFAULT)
        )
        disks[each.uuid] = _inherited_files(files, numbers)
        sizes[each.uuid] = files.size_mib
    cdroms = [
        _inherited_files(stack.enter_context(opened(medium(path))), numbers) if path else None
        for path in spec.cdroms
    ]
    firmware = _open_uefi(spec, numbers, stack) if spec.firmware == UEFI else None
    console_log = _open_console_log(spec, numbers, stack) if spec.serial_console else None
    nics = _open_nics(spec, stack) if spec.nics else {}
    identity = _identity(spec, stack)
    root = _empty_root() if spec.chroot else None
    version = _version(spec) if identity or root else (0, 0)
    resources = Resources(
        control=InstanceFiles(spec.name),
        disks=disks,
        nics=nics,
        cdroms=cdroms,
        console_log=console_log,
        uefi=firmware,
        identity=identity,
        root=root,
        version=version,
    )
    return resources, sizes


def medium(path: str | Path) -> Disk:
    """A file that QEMU only reads."""
    return Disk(uuid="", path=Path(path), cache="writeback", read_only=True)


def _inherited_files(files: Opened, numbers: Iterator[int]) -> DiskFiles:
    """The descriptors of a disk that QEMU inherits.

    :param numbers: of their sets.
    """
    number, descriptors = next(numbers), _inherited(files.descriptors)
    backing = tuple(_inherited_files(each, numbers) for each in files.backing)
    return DiskFiles(number, descriptors, files.is_device, backing)


def _open_console_log(spec: Spec, numbers: Iterator[int], stack: ExitStack) -> DiskFiles | None:
    """The pipe of the log of its serial line, if there is one."""
    try:
        writer = open_pipe(spec.name)
    except OSError as error:
        text = f"{spec.name}: what it says is not logged: {error.filename}: {error.strerror}"
        print(f"brine-instance: warning: {text}", file=sys.stderr)
        return None
    stack.callback(os.close, writer)
    return DiskFiles(next(numbers), _inherited([writer]), is_device=False)


def _open_uefi(spec: Spec, numbers: Iterator[int], stack: ExitStack) -> UefiFiles:

    found = find_uefi(spec)
    code = stack.enter_context(opened(medium(found.code)))
    variables = stack.enter_context(opened_variables(spec.name, found.variables))
    return UefiFiles(
        _inherited_files(code, numbers),
        DiskFiles(next(numbers), _inherited([variables]), is_device=False),
    )


def _open_nics(spec: Spec, stack: ExitStack) -> dict[str, NicFiles]:
    from brine.hotplug.net.tap import open_tap  # both take long to load, and are for NICs only
    from brine.hotplug.net.wiring import unwire, wire

    nics = {}
    for each in spec.nics:
        nic = nic_of(spec, each)
        name = nic.tap_name()
        tap = stack.enter_context(open_tap(name, queues=nic.queues, vhost=nic.vhost))
        wire(tap, nic)
        stack.callback(unwire, name)
        nics[each.uuid] = NicFiles(_inherited(tap.queues), _inherited(tap.vhost))
    return nics


def _identity(spec: Spec, stack: ExitStack) -> QemuUser | None:
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
        return QemuUser(user.pw_uid, user.pw_gid)
    from brine.common.uids import request_unused_uid

    uid = stack.enter_context(request_unused_uid(_uid_pool()))
    uid.hand_over()
    return QemuUser(uid.uid, uid.uid)


def _refuse_mighty(name: str, user: pwd.struct_passwd) -> None:
    """Refuse a user with privileges that a guest must not get by breaking out.

    QEMU gets the user's primary group only.

    :raises InstanceError: which privileges.
    """
    if user.pw_uid == 0:
        raise InstanceError(name, "security_user must not be root")
    if user.pw_gid == 0:
        group = "root"
    else:
        try:
            group = grp.getgrgid(user.pw_gid).gr_name
        except KeyError:
            return  # a group without a name owns nothing that counts
    if group in _MIGHTY_GROUPS:
        text = f"security_user must not be of the group {group}, as {user.pw_name} is"
        raise InstanceError(name, text, hint=f"useradd --system --user-group {name}")


def _uid_pool() -> list[list[int]]:
    """The node's own pool, or else the cluster's, or else the default pool."""
    # The cluster's configuration takes long to load, and most starts don't need it.
    from brine.common.uids import parse_uid_pool
    from brine.config.ssconf import Ssconf, SsconfError
    from brine.instance.settings import DEFAULT_UID_POOL, load_uid_pool

    if pool := load_uid_pool():
        return pool
    try:
        if pool := [list(each) for each in Ssconf().uid_pool()]:
            return pool
    except SsconfError:
        pass  # it is a node of no cluster
    return parse_uid_pool(DEFAULT_UID_POOL)


def _empty_root() -> Path:
    EMPTY_ROOT.mkdir(mode=0o555, parents=True, exist_ok=True)
    return EMPTY_ROOT


def _version(spec: Spec) -> tuple[int, int]:
    import subprocess  # takes long to load, and most starts have no need of it

    try:
        done = subprocess.run(
            [spec.qemu, "--version"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_VERSION_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise InstanceError(spec.name, f"{spec.qemu}: {error}") from error
    if match := _VERSION.search(done.stdout):
        return int(match[1]), int(match[2])
    raise InstanceError(spec.name, f"{spec.qemu} does not say its version")


def _inherited(descriptors: Iterable[int]) -> tuple[int, ...]:
    """Descriptors that stay open when this process becomes QEMU."""
    numbers = tuple(descriptors)
    for number in numbers:
        os.set_inheritable(number, True)
    return numbers


# The choice of a machine's UEFI firmware among those that this node has.

FOLDERS = (Path("/etc/qemu/firmware"), Path("/usr/share/qemu/firmware"))
"""Folders of firmware descriptors; a file in an earlier folder replaces one of its name in a
later."""

_SUFFIX = ".json"
# Features that need another machine than a spec describes, or that need enrolled keys.
_UNWANTED = {"requires-smm", "enrolled-keys", "amd-sev-es-only", "intel-tdx", "amd-sev-snp"}
_VERSIONED = {"pc": "pc-i440fx-", "q35": "pc-q35-"}


@dataclass(frozen=True, slots=True)
class Uefi:
    """A firmware in two parts.

    :param code: the program, which all instances share.
    :param variables: the template of the variables, of which each instance has its own copy.
    """

    code: Path
    variables: Path


def find_uefi(spec: Spec) -> Uefi:
    """The firmware for a machine: the first that fits and does not need Secure Boot.

    :raises InstanceError: if the node has none.
    """
    for file in _descriptors():
        try:
            found = _fitting(spec, json.loads(read_regular(file)))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # of another's making, and others may do
        if found and found.code.exists() and found.variables.exists():
            return found
    folders = " and ".join(map(str, FOLDERS))
    raise InstanceError(
        spec.name,
        f"this node has no UEFI firmware for the machine {spec.machine}: none of {folders}",
        hint="apt install ovmf, or have its spec name a firmware's image",
    )


def _descriptors() -> Iterator[Path]:
    """The descriptors by name, of all folders. An empty file hides the one of its name."""
    first: dict[str, Path] = {}
    for folder in FOLDERS:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            if name.endswith(_SUFFIX):
                first.setdefault(name, folder / name)
    yield from (first[name] for name in sorted(first))


def _fitting(spec: Spec, descriptor: dict[str, Any]) -> Uefi | None:
    """The firmware of a descriptor; None if it is not for this machine."""
    mapping = descriptor["mapping"]
    is_split = mapping["device"] == "flash" and mapping.get("mode", "split") == "split"
    if "uefi" not in descriptor["interface-types"] or not is_split:
        return None
    if _UNWANTED & set(descriptor["features"]):
        return None
    if not any(_is_for(spec, target) for target in descriptor["targets"]):
        return None
    parts = (mapping["executable"], mapping["nvram-template"])
    if any(part["format"] != "raw" for part in parts):
        return None
    code, variables = (Path(part["filename"]) for part in parts)
    return Uefi(code, variables)


def _is_for(spec: Spec, target: dict[str, Any]) -> bool:
    architecture = Path(spec.qemu).name.removeprefix("qemu-system-")
    # A QEMU of another name, such as kvm, emulates the node's own kind of processor.
    if architecture == Path(spec.qemu).name:
        architecture = os.uname().machine
    # An alias such as q35 means the newest version of the machine.
    machine = f"{_VERSIONED[spec.machine]}0" if spec.machine in _VERSIONED else spec.machine
    is_machine = any(fnmatch.fnmatchcase(machine, pattern) for pattern in target["machines"])
    return bool(target["architecture"] == architecture and is_machine)


# UEFI variables: one file for each instance, made from a template, kept for the next start.

_MODE = 0o600


@contextlib.contextmanager
def opened_variables(name: str, template: Path) -> Iterator[int]:
    """Open an instance's variables, for the time of the block, as a descriptor to read and write.

    :param template: the initial variables.
    :raises InstanceError: if they can't be made or opened, or do not have the template's size: then
        they belong to another firmware.
    """
    file = InstanceFiles(name).uefi_variables
    try:
        if not file.exists():
            paths.UEFI_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(file, read_regular(template), mode=_MODE, alone=True)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(file, flags)
        size = template.stat().st_size
    except OSError as error:
        text = f"{error.filename or file}: can't be used: {error.strerror}"
        raise InstanceError(name, text) from error
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
    """Copy the UEFI variables of an instance, such as its boot order, to another, if there are any.

    :raises InstanceError: if that fails.
    """
    try:
        write_whole(
            InstanceFiles(other).uefi_variables,
            read_regular(InstanceFiles(name).uefi_variables),
            mode=_MODE,
            alone=True,
        )
    except FileNotFoundError:
        return
    except OSError as error:
        text = f"{InstanceFiles(name).uefi_variables}: can't be copied: {error.strerror}"
        raise InstanceError(other, text) from error
