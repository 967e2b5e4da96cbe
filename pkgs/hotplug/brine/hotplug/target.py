"""The VM that a command line names: its socket and its files, who uses it, and what is in it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.cli import table
from brine.common.errors import BrineError, UsageError, printable
from brine.common.files import read_regular
from brine.common.peer import stranger_check
from brine.common.privileges import Capability, keep_only
from brine.common.process import spoken_wait
from brine.common.qmp.client import LIMIT_S, QmpClient
from brine.common.qmp.wire import QmpTimeoutError
from brine.hotplug.address import DeviceKind
from brine.hotplug.errors import HotplugError
from brine.hotplug.qemu import Device, Machine, devices_of


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
    if not name or "/" in name:
        return
    if os.path.lexists(_spec(name)) or os.path.lexists(paths.CONTROL_DIR / f"{name}.qmp"):
        noun = arguments.noun
        raise UsageError(f"which {noun}?", hint=f"brine {noun.lower()} list {name}")


def _refuse_down(name: str, qmp: Path) -> None:
    """Refuse an instance without a socket."""
    try:
        qmp.stat()
    except PermissionError as error:
        hint = f"be root, or in the group {paths.CONTROL_GROUP}"
        raise BrineError(f"{qmp}: {error.strerror}", hint=hint) from error
    except OSError:
        if _is_xens(name):
            text = f"{name}: is a domain of Xen's, and nothing is plugged into those"
            raise BrineError(text, hint="its next start has what its spec has") from None
        if os.path.lexists(_spec(name)):
            hint = f"brine instance start {name}"
            raise BrineError(f"{name}: does not run", hint=hint) from None
        hint = f"brine instance info {name}; or name its socket with --qmp"
        raise UsageError(f"{name}: does not run here, or is no instance", hint=hint) from None


def _spec(name: str) -> Path:
    return paths.SPECS_DIR / f"{name}.json"


def _is_xens(name: str) -> bool:
    try:
        spec = json.loads(read_regular(_spec(name)))
        return str(spec["hypervisor"]).startswith("xen-")
    except (OSError, ValueError, TypeError, KeyError):
        return False


def runtime_file(arguments: argparse.Namespace) -> Path | None:
    """The VM's runtime file: the named one, or that of the instance."""
    if arguments.runtime:
        return Path(arguments.runtime).absolute()
    name = _instance_at(arguments.qmp)
    if name is None:
        return None
    own = paths.InstanceFiles(name).runtime
    if own.exists():
        return own
    if _spec(name).exists():
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


def waiting() -> contextlib.AbstractContextManager[None]:
    """Tell a person at a terminal why the block takes long."""
    if sys.stderr.isatty():
        return spoken_wait("waiting for the VM ...")
    return contextlib.nullcontext()


# ``brine nic list`` and ``brine disk list``.


def list_nics(arguments: argparse.Namespace) -> int:
    """``brine nic list``."""
    return _list(arguments, DeviceKind.NIC)


def list_disks(arguments: argparse.Namespace) -> int:
    """``brine disk list``."""
    return _list(arguments, DeviceKind.DISK)


def _list(arguments: argparse.Namespace, kind: DeviceKind) -> int:
    """Print the devices that Brine plugged into a VM."""
    find_socket(arguments)
    give_up_privileges(kind)
    devices = [device.described() for device in _look(arguments, kind)]
    if arguments.json:
        print(json.dumps(devices, indent=2))
    elif devices:
        heading = [key.upper().replace("_", " ") for key in devices[0]]
        rows = [[_cell(value) for value in one.values()] for one in devices]
        print(*table([heading, *rows]), sep="\n")
    else:
        print("nothing is plugged in")
    return 0


def _cell(value: Any) -> str:
    return "-" if value in (None, "") else printable(str(value))


def _look(arguments: argparse.Namespace, kind: DeviceKind) -> list[Device]:
    timeout_s = arguments.qmp_timeout
    limit_s = max(LIMIT_S, 2 * timeout_s)
    with waiting(), monitor(arguments.qmp, timeout_s=timeout_s, limit_s=limit_s) as qmp:
        machine = Machine(qmp)
        return devices_of(machine, kind, machine.vm_name())


# The clients of a VM's monitor. It serves one at a time, and does not say which.


@contextlib.contextmanager
def monitor(
    qmp_path: Path,
    *,
    timeout_s: float,
    limit_s: float,
    through: Callable[[socket.socket], socket.socket] | None = None,
) -> Iterator[QmpClient]:
    """Connect to a VM's monitor, for the time of the block; see :meth:`QmpClient.connect`.

    :param timeout_s: for the connection, and for each answer.
    :raises HotplugError: if another client holds the monitor.
    """
    client = QmpClient.connect(
        qmp_path,
        timeout_s=timeout_s,
        answer_timeout_s=timeout_s,
        limit_s=limit_s,
        check_peer=stranger_check(qmp_path),
        through=through,
    )
    with contextlib.ExitStack() as stack:
        try:
            qmp = stack.enter_context(client)
        except QmpTimeoutError as error:
            raise _silence_of(qmp_path, timeout_s) from error
        yield qmp


def _silence_of(qmp_path: Path, timeout_s: float) -> BrineError:
    """The error of a monitor that did not answer within the timeout."""
    if holders := _monitor_holders(qmp_path):
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


def _monitor_holders(qmp_path: Path) -> list[str]:
    """The other processes that are connected to a socket, as far as this user may see them, such
    as ``process 123 (socat)``, including those that wait for their turn."""
    clients = _clients_of(qmp_path)
    found = []
    for process in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        folder = Path(f"/proc/{process}")
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if process != os.getpid() and clients & set(map(_target, (folder / "fd").iterdir())):
                command = (folder / "comm").read_text().strip()
                found.append(f"process {process} ({command})")
    return found


def _clients_of(path: Path) -> set[str]:
    """Clients' sockets, as /proc shows them. Source: :manpage:`sock_diag(7)`."""
    # It takes long to load, and only a silent monitor needs it.
    from pyroute2 import DiagSocket
    from pyroute2.netlink.diag import UDIAG_SHOW_PEER, UDIAG_SHOW_VFS

    inode, found = os.stat(path).st_ino & 0xFFFFFFFF, set()
    with DiagSocket() as kernel:
        kernel.bind()
        show = UDIAG_SHOW_PEER | UDIAG_SHOW_VFS
        for row in kernel.get_sock_stats(family=socket.AF_UNIX, show=show):
            peer, file = row.get_attr("UNIX_DIAG_PEER"), row.get_attr("UNIX_DIAG_VFS")
            if peer and file and file["udiag_vfs_ino"] == inode:
                found.add(f"socket:[{peer}]")
    return found


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(link)
    return ""
