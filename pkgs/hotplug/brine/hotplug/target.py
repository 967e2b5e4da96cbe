"""The VM that a command works on: its socket, its runtime file and its instance."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError, UsageError
from brine.common.privileges import Capability, keep_only
from brine.common.progress import spoken_wait
from brine.hotplug.errors import HotplugError
from brine.vm.address import DeviceKind
from brine.vm.files import InstanceFiles
from brine.vm.instances import hypervisor_in_spec, instance_behind


@dataclass(frozen=True, slots=True)
class Target:
    """A VM that is named by its QMP socket.

    :param runtime: its runtime file, if that is named, too.
    """

    qmp: Path
    runtime: Path | None = None

    def vm_name(self) -> str:
        """The name of the VM, as its socket has it."""
        return self.qmp.stem

    def instance(self) -> str | None:
        """The name of the instance; None if the VM may be none."""
        return instance_behind(self.qmp, self.runtime)

    def runtime_file(self) -> Path | None:
        """The VM's runtime file: the named one, or that of the instance.

        :raises HotplugError: if the instance has lost it.
        """
        if self.runtime:
            return self.runtime.absolute()
        name = instance_behind(self.qmp, None)
        if name is None:
            return None
        files = InstanceFiles(name)
        if files.runtime.exists():
            return files.runtime
        if files.spec.exists():
            text = f"{name}: there is no {files.runtime}, without which its next start does not "
            text += "know of changes"
            hint = f"brine instance reboot {name}, or start if it does not run, writes it"
            raise HotplugError(text, hint=hint)
        return None


def find_target(
    name: str | None, qmp: Path | None, runtime: Path | None = None, *, must_run: bool = True
) -> Target:
    """The VM that was named by instance or by socket.

    :raises UsageError: if it was not named, or twice.
    :raises BrineError: if the instance does not run, and *must_run* is given.
    """
    hint = "give the name of an instance, or --qmp SOCKET"
    if name is None:
        if qmp is None:
            raise UsageError("no VM is named", hint=hint)
        return Target(qmp, runtime)
    if qmp is not None:
        raise UsageError(f"{name} and --qmp are two names of a VM", hint=hint)
    if not name or "/" in name:
        raise UsageError(f"not the name of an instance: {name!r}")
    target = Target(InstanceFiles(name).qmp, runtime)
    if must_run:
        _refuse_down(name, target.qmp)
    return target


def is_instance(name: str) -> bool:
    """Whether an instance has that name, or runs by it."""
    files = InstanceFiles(name)
    return os.path.lexists(files.spec) or os.path.lexists(files.qmp)


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
