"""Opening what an instance's QEMU is given: disks, taps, a user of its own.

All of it is open here first, so that a start that can't succeed fails before there is a QEMU, and
so that QEMU inherits it: this process becomes QEMU.
"""

from __future__ import annotations

import grp
import itertools
import os
import pwd
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from brine.hotplug.disk import Disk
from brine.hotplug.disk_files import Opened, opened
from brine.instance.checks import UEFI
from brine.instance.console_log import open_pipe
from brine.instance.control import control_of
from brine.instance.devices import disk_of, wish_of
from brine.instance.qemu_args import DiskFiles, Identity, NicFiles, Resources, UefiFiles
from brine.instance.spec import FormatSource, SecurityModel, Spec
from brine.instance.spec_files import InstanceError

EMPTY_ROOT = Path("/run/brine/empty")
"""What a confined QEMU sees as its root."""

_MIGHTY_GROUPS = frozenset(
    {
        *("adm", "brine", "brine-kvmd", "dialout", "disk", "docker", "incus-admin", "input"),
        *("kmem", "libvirt", "lxd", "root", "shadow", "sudo", "systemd-journal", "tape", "tty"),
        "wheel",
    }
)
"""Groups that own devices, secrets, other VMs, or a way to root."""

_VERSION = re.compile(r"version (\d+)\.(\d+)")
_VERSION_TIMEOUT_S = 20


def open_resources(spec: Spec, stack: ExitStack) -> tuple[Resources, dict[str, int]]:
    """Open what the spec names.

    :param stack: closes it, and undoes what was done to the network.
    :returns: that, and the sizes of the disks in MiB, by UUID.
    :raises BrineError: what can't be had. What was done is for *stack* to undo.
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
        control=control_of(spec.name),
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
    """What QEMU inherits of a disk.

    :param numbers: of the sets that it is put in.
    """
    number, descriptors = next(numbers), _inherited(files.descriptors)
    backing = tuple(_inherited_files(each, numbers) for each in files.backing)
    return DiskFiles(number, descriptors, files.is_device, backing)


def _open_console_log(spec: Spec, numbers: Iterator[int], stack: ExitStack) -> DiskFiles | None:
    """The pipe of the log of its serial line; without one it starts all the same."""
    try:
        writer = open_pipe(spec.name)
    except OSError as error:
        text = f"{spec.name}: what it says is not logged: {error.filename}: {error.strerror}"
        print(f"brine-instance: warning: {text}", file=sys.stderr)
        return None
    stack.callback(os.close, writer)
    return DiskFiles(next(numbers), _inherited([writer]), is_device=False)


def _open_uefi(spec: Spec, numbers: Iterator[int], stack: ExitStack) -> UefiFiles:
    from brine.instance import uefi_variables
    from brine.instance.uefi import find_uefi

    found = find_uefi(spec)
    code = stack.enter_context(opened(medium(found.code)))
    variables = stack.enter_context(uefi_variables.opened(spec.name, found.variables))
    return UefiFiles(
        _inherited_files(code, numbers),
        DiskFiles(next(numbers), _inherited([variables]), is_device=False),
    )


def _open_nics(spec: Spec, stack: ExitStack) -> dict[str, NicFiles]:
    from brine.hotplug.taps import open_tap  # both take long to load, and are for NICs only
    from brine.hotplug.wiring import unwire, wire

    nics = {}
    for each in spec.nics:
        wish = wish_of(spec, each)
        name = wish.wiring.tap_name()
        tap = stack.enter_context(open_tap(name, queues=wish.queues, vhost=wish.vhost))
        wire(tap, wish.wiring)
        stack.callback(unwire, name)
        nics[each.uuid] = NicFiles(_inherited(tap.queues), _inherited(tap.vhost))
    return nics


def _identity(spec: Spec, stack: ExitStack) -> Identity | None:
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
        return Identity(user.pw_uid, user.pw_gid)
    from brine.common.uids import request_unused_uid

    uid = stack.enter_context(request_unused_uid(_uid_pool()))
    uid.hand_over()
    return Identity(uid.uid, uid.uid)


def _refuse_mighty(name: str, user: pwd.struct_passwd) -> None:
    """Refuse a user that a guest which has broken out must not become.

    QEMU has the user's own group alone, whichever others the user is in.

    :raises InstanceError: what the user is, or may do.
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
    """The node's own, or else the cluster's, or else the one that each node has."""
    # The cluster's configuration takes long to load, and most starts have no need of it.
    from brine.common.config.ssconf import Ssconf
    from brine.common.config.ssconf_values import SsconfError
    from brine.common.uid_pool import parse_uid_pool
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
