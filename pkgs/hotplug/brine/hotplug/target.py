"""The VM that a command line names: its socket, its runtime file, its instance and its devices."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.cli import print_table
from brine.common.errors import BrineError, UsageError, printable
from brine.common.privileges import Capability, keep_only
from brine.common.progress import spoken_wait
from brine.common.qmp.client import LIMIT_S
from brine.hotplug.errors import HotplugError
from brine.hotplug.qemu import Device, Machine, devices_of, monitor
from brine.vm.address import DeviceKind
from brine.vm.files import InstanceFiles
from brine.vm.instances import hypervisor_in_spec, instance_behind


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
        arguments.qmp = InstanceFiles(name).qmp
        if not getattr(arguments, "no_hotplug", False):
            _refuse_down(name, arguments.qmp)


def _refuse_without_device(arguments: argparse.Namespace) -> None:
    """Refuse a single name where two are due, if it is the name of an instance."""
    name = getattr(arguments, "device", None)
    if not name or "/" in name:
        return
    files = InstanceFiles(name)
    if os.path.lexists(files.spec) or os.path.lexists(files.qmp):
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
        hypervisor = hypervisor_in_spec(name)
        if hypervisor and hypervisor.startswith("xen-"):
            text = f"{name}: is a domain of Xen's, and nothing is plugged into those"
            raise BrineError(text, hint="its next start has what its spec has") from None
        if os.path.lexists(InstanceFiles(name).spec):
            hint = f"brine instance start {name}"
            raise BrineError(f"{name}: does not run", hint=hint) from None
        hint = f"brine instance info {name}; or name its socket with --qmp"
        raise UsageError(f"{name}: does not run here, or is no instance", hint=hint) from None


def runtime_file(arguments: argparse.Namespace) -> Path | None:
    """The VM's runtime file: the named one, or that of the instance."""
    if arguments.runtime:
        return Path(arguments.runtime).absolute()
    name = instance_behind(arguments.qmp, None)
    if name is None:
        return None
    own = InstanceFiles(name).runtime
    if own.exists():
        return own
    if InstanceFiles(name).spec.exists():
        text = f"{name}: there is no {own}, without which its next start does not know of changes"
        hint = f"brine instance reboot {name}, or start if it does not run, writes it"
        raise HotplugError(text, hint=hint)
    return None


def instance_of(arguments: argparse.Namespace) -> str | None:
    """The name of the instance; None if the VM may be none."""
    return instance_behind(arguments.qmp, arguments.runtime and Path(arguments.runtime))


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


# ``brine nic list`` and ``brine disk list``, which load nothing that changes a VM.


def list_nics(arguments: argparse.Namespace) -> int:
    return _list(arguments, DeviceKind.NIC)


def list_disks(arguments: argparse.Namespace) -> int:
    return _list(arguments, DeviceKind.DISK)


def _list(arguments: argparse.Namespace, kind: DeviceKind) -> int:
    """Print the devices that Brine plugged into a VM."""
    find_socket(arguments)
    give_up_privileges(kind)
    devices = [device.described() for device in _look(arguments, kind)]
    if arguments.json:
        print(json.dumps(devices, indent=2))
    else:
        heading = [key.upper().replace("_", " ") for one in devices[:1] for key in one]
        rows = [[_cell(value) for value in one.values()] for one in devices]
        print_table(heading, rows, none="nothing is plugged in")
    return 0


def _cell(value: Any) -> str:
    return "-" if value in (None, "") else printable(str(value))


def _look(arguments: argparse.Namespace, kind: DeviceKind) -> list[Device]:
    timeout_s = arguments.qmp_timeout
    limit_s = max(LIMIT_S, 2 * timeout_s)
    with waiting(), monitor(arguments.qmp, timeout_s=timeout_s, limit_s=limit_s) as qmp:
        machine = Machine(qmp)
        return devices_of(machine, kind, machine.vm_name())
