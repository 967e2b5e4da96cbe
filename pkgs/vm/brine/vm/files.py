"""The files of an instance on its node."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from brine.common import paths


class _InstanceFile:
    """A file of an instance: in a folder of the node's, with the instance's name."""

    def __init__(self, folder: Callable[[], Path], suffix: str = "") -> None:
        self._folder = folder
        self._suffix = suffix

    def __get__(self, files: InstanceFiles, _kind: object) -> Path:
        return self._folder() / f"{files.name}{self._suffix}"


class InstanceFiles:
    """The files of an instance, except its markers."""

    def __init__(self, name: str) -> None:
        self.name = name

    spec = _InstanceFile(lambda: paths.SPECS_DIR, ".json")
    """Its spec."""
    qmp = _InstanceFile(lambda: paths.CONTROL_DIR, ".qmp")
    """QEMU's QMP socket for tools and people."""
    events = _InstanceFile(lambda: paths.CONTROL_DIR, ".kvmd")
    """QEMU's QMP socket for brine-kvmd."""
    unit = _InstanceFile(lambda: paths.CONTROL_DIR.parent / "unit", ".qmp")
    """QEMU's QMP socket for the unit, in a folder that only root enters: a client that keeps *qmp*
    busy does not keep the guest from being asked to shut down."""
    serial = _InstanceFile(lambda: paths.CONTROL_DIR, ".serial")
    """The socket of the serial line."""
    agent = _InstanceFile(lambda: paths.CONTROL_DIR, ".agent")
    """The socket of the guest agent."""
    stopping = _InstanceFile(lambda: paths.CONTROL_DIR, ".stopping")
    """An empty file of other programs' stops. Brine itself does not believe it, as a whole group
    may write there."""
    shutdown = _InstanceFile(lambda: paths.CONTROL_DIR, ".shutdown")
    """An empty file, which tells other programs of a user's shutdown."""
    domain = _InstanceFile(lambda: paths.CONTROL_DIR.parent / "xen", ".cfg")
    """The configuration that xl got at the last start; only Xen instances have one."""
    runtime = _InstanceFile(lambda: paths.RUNTIME_DIR, ".json")
    """The runtime file."""
    awaited = _InstanceFile(lambda: paths.CONTROL_DIR.parent / "awaited", ".json")
    """What the next run takes over from another node; see :mod:`brine.instance.awaited`."""
    console_pipe = _InstanceFile(lambda: paths.CONSOLE_DIR)
    """The pipe that takes the guest's output."""
    console_log = _InstanceFile(lambda: paths.CONSOLE_LOG_DIR, ".log")
    """The log of the serial line."""
    previous_console_log = _InstanceFile(lambda: paths.CONSOLE_LOG_DIR, ".log.1")
    """The log before."""
    uefi_variables = _InstanceFile(lambda: paths.UEFI_DIR, ".fd")
    """The UEFI variables, if there are any."""

    def has_domain(self) -> bool:
        """Whether the last start was that of a domain; False for a user who may not look."""
        return os.path.exists(self.domain)  # Path.exists() would raise that user's error

    def sockets(self) -> tuple[Path, ...]:
        """The sockets of QEMU."""
        return (self.qmp, self.events, self.unit, self.serial, self.agent)
