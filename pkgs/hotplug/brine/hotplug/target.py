"""The VM that a command line names: its socket, who uses that, its runtime file, its instance."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError, UsageError
from brine.common.files import read_regular
from brine.common.privileges import Capability, keep_only
from brine.common.qmp.wire import QmpTimeoutError
from brine.hotplug.address import DeviceKind
from brine.hotplug.errors import HotplugError


def find_socket(arguments: argparse.Namespace) -> None:
    """Set ``qmp`` to the QMP socket of the VM, whether it was named by instance or by socket.

    :raises UsageError: if the VM was not named, or twice.
    """
    name = arguments.vm
    if name is None and arguments.qmp is None:
        _refuse_without_device(arguments)
    if (name is None) == (arguments.qmp is None):
        text = "which VM?" if name is None else f"{name} and --qmp are two names of a VM"
        raise UsageError(text, hint="give the name of an instance, or --qmp SOCKET")
    if name is not None:
        if not name or "/" in name:
            raise UsageError(f"not the name of an instance: {name!r}")
        arguments.qmp = paths.CONTROL_DIR / f"{name}.qmp"
        if not getattr(arguments, "no_hotplug", False):
            _refuse_down(name, arguments.qmp)


def _refuse_without_device(arguments: argparse.Namespace) -> None:
    """Refuse a single name where two are due, if it is the name of an instance."""
    name = getattr(arguments, "device", None)
    if name and "/" not in name and (_is_defined(name) or _has_monitor(name)):
        noun = arguments.noun
        raise UsageError(f"which {noun}?", hint=f"brine {noun.lower()} list {name}")


def _refuse_down(name: str, qmp: Path) -> None:
    """Refuse an instance without a socket.

    :raises UsageError: if there is no such instance; another error if it does not run.
    """
    try:
        qmp.stat()
    except PermissionError as error:
        hint = f"be root, or in the group {paths.CONTROL_GROUP}"
        raise BrineError(f"{qmp}: {error.strerror}", hint=hint) from error
    except OSError:
        if _is_xens(name):
            text = f"{name}: is a domain of Xen's, and nothing is plugged into those"
            raise BrineError(text, hint="its next start has what its spec has") from None
        if _is_defined(name):
            hint = f"brine instance start {name}"
            raise BrineError(f"{name}: does not run", hint=hint) from None
        hint = f"brine instance info {name}; or name its socket with --qmp"
        raise UsageError(f"{name}: does not run here, or is no instance", hint=hint) from None


def _is_defined(name: str) -> bool:
    return os.path.lexists(paths.SPECS_DIR / f"{name}.json")


def _is_xens(name: str) -> bool:
    try:
        spec = json.loads(read_regular(paths.SPECS_DIR / f"{name}.json"))
        return str(spec["hypervisor"]).startswith("xen-")
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _has_monitor(name: str) -> bool:
    return os.path.lexists(paths.CONTROL_DIR / f"{name}.qmp")


def runtime_file(arguments: argparse.Namespace) -> Path | None:
    """The VM's runtime file: the named one, or that of the instance.

    :raises HotplugError: if the instance has none. Its next start would silently lose a change.
    """
    if arguments.runtime:
        return Path(arguments.runtime).absolute()
    name = _instance_at(arguments.qmp)
    if name is None:
        return None
    own = paths.InstanceFiles(name).runtime
    if own.exists():
        return own
    if (paths.SPECS_DIR / f"{name}.json").exists():
        text = f"{name}: there is no {own}, without which its next start does not know of changes"
        hint = f"brine instance reboot {name}, or start if it does not run, writes it"
        raise HotplugError(text, hint=hint)
    return None


def instance_of(arguments: argparse.Namespace) -> str | None:
    """The name of the instance; None if the VM may be none."""
    if arguments.runtime:
        file = Path(os.path.realpath(arguments.runtime))
        if file.parent == Path(os.path.realpath(paths.RUNTIME_DIR)):
            return file.stem
    return _instance_at(arguments.qmp)


def _instance_at(qmp: Path) -> str | None:
    """The instance whose socket it is, if it is in the control directory."""
    # Unlike Path.resolve(), this accepts a loop of symbolic links.
    socket = Path(os.path.realpath(qmp))
    return socket.stem if socket.parent == Path(os.path.realpath(paths.CONTROL_DIR)) else None


def give_up_privileges(kind: DeviceKind) -> None:
    """Give up the privileges that work on devices of a kind does not need."""
    # Sockets, disks and runtime files may belong to any user. So may the process that holds a
    # monitor, and a script that takes too long.
    network = (Capability.NET_ADMIN, Capability.KILL) if kind is DeviceKind.NIC else ()
    keep_only(Capability.DAC_OVERRIDE, Capability.CHOWN, Capability.SYS_PTRACE, *network)


# The clients of a VM's monitor. It serves one at a time, and does not say which.


def monitor_holders(qmp_path: Path) -> list[str]:
    """The other processes that are connected to a socket, as far as this user may see them.

    :param qmp_path: the path that QEMU was given.
    :returns: such as ``process 123 (socat)``, including those that wait for their turn.
    """
    inodes = _connected_to(qmp_path)
    return _owners(inodes) if inodes else []


def silence_of(qmp_path: Path, timeout_s: float) -> BrineError:
    """The error of a monitor that did not answer within the timeout."""
    if holders := monitor_holders(qmp_path):
        return HotplugError(
            f"{qmp_path}: the monitor is in use, and was for {timeout_s:g} s: {', '.join(holders)}",
            hint="it serves one client at a time; have it let go, or use another socket",
        )
    # A process in another network namespace, such as the KVM daemon, is not visible here.
    if qmp_path.suffix == ".kvmd":
        hint = f"that is the KVM daemon's; tools use {qmp_path.with_suffix('.qmp').name} beside it"
    else:
        hint = "nobody is seen to have its monitor: see whether it hangs or is stopped"
    text = f"{qmp_path}: QEMU does not answer, and did not for {timeout_s:g} s"
    return QmpTimeoutError(text, hint=hint)


def _connected_to(path: Path) -> set[int]:
    """The inodes of clients' sockets. Source: :manpage:`sock_diag(7)`."""
    # Takes long to load, and only a silent monitor needs it.
    from pyroute2 import DiagSocket
    from pyroute2.netlink.diag import SS_ALL, UDIAG_SHOW_PEER, UDIAG_SHOW_VFS

    file = os.stat(path).st_ino
    with DiagSocket() as diag:
        diag.bind()
        show = UDIAG_SHOW_PEER | UDIAG_SHOW_VFS
        rows = list(diag.get_sock_stats(family=socket.AF_UNIX, states=SS_ALL, show=show))
    found = set()
    for row in rows:
        bound = row.get_attr("UNIX_DIAG_VFS")
        peer = row.get_attr("UNIX_DIAG_PEER")
        if peer and bound and bound["udiag_vfs_ino"] == file:
            found.add(peer)
    return found


def _owners(inodes: set[int]) -> list[str]:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    found = []
    for process in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        if process == os.getpid():
            continue
        folder = Path(f"/proc/{process}")
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if any(_target(link) in wanted for link in (folder / "fd").iterdir()):
                command = (folder / "comm").read_text().strip()
                found.append(f"process {process} ({command})")
    return found


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(link)
    return ""
