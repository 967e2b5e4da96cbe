"""Where Brine's files are. The design's table of files is the source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

ETC_DIR = Path("/etc/brine")
CONTROL_DIR = Path("/run/brine/ctrl")
MARKS_DIR = Path("/run/brine/marks")
TAPS_DIR = Path("/run/brine/taps")
HOTPLUG_DIR = Path("/run/brine/hotplug")
LIFECYCLE_DIR = Path("/run/brine/lifecycle")
ENDED_DIR = Path("/run/brine/ended")
CONTROL_GROUP = "brine-ctrl"
CONSOLE_DIR = Path("/run/brine/console")
CONSOLE_LOG_DIR = Path("/var/log/brine/console")
LOCK_DIR = Path("/run/lock/brine")
STATE_DIR = Path("/var/lib/brine")
CONFIG_FILE = STATE_DIR / "config.data"
CONFIG_LOCK = LOCK_DIR / "config.lock"
RUNTIME_DIR = STATE_DIR / "runtime"
SPECS_DIR = STATE_DIR / "instances"
OUTBOX_DIR = STATE_DIR / "outbox"
UEFI_DIR = STATE_DIR / "uefi"
SSCONF_DIR = STATE_DIR / "ssconf"
NODE_FILE = STATE_DIR / "node.json"
NIC_SCRIPTS_DIR = ETC_DIR / "nic.d"
KEY_FILE = ETC_DIR / "hmac.key"
PREVIOUS_KEY_FILE = ETC_DIR / "hmac.key.previous"


def settings_file(daemon: str) -> Path:
    """The settings of one daemon, e.g. ``/etc/brine/kvmd.toml`` for ``kvmd``; may be absent."""
    return ETC_DIR / f"{daemon}.toml"


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

    spec = _InstanceFile(lambda: SPECS_DIR, ".json")
    """Its spec."""
    qmp = _InstanceFile(lambda: CONTROL_DIR, ".qmp")
    """QEMU's QMP socket for tools and people."""
    events = _InstanceFile(lambda: CONTROL_DIR, ".kvmd")
    """QEMU's QMP socket for brine-kvmd."""
    unit = _InstanceFile(lambda: CONTROL_DIR.parent / "unit", ".qmp")
    """QEMU's QMP socket for the unit, in a folder that only root enters: a client that keeps *qmp*
    busy does not keep the guest from being asked to shut down."""
    serial = _InstanceFile(lambda: CONTROL_DIR, ".serial")
    """The socket of the serial line."""
    agent = _InstanceFile(lambda: CONTROL_DIR, ".agent")
    """The socket of the guest agent."""
    stopping = _InstanceFile(lambda: CONTROL_DIR, ".stopping")
    """An empty file of other programs' stops. Brine itself does not believe it, as a whole group
    may write there."""
    shutdown = _InstanceFile(lambda: CONTROL_DIR, ".shutdown")
    """An empty file, which tells other programs of a user's shutdown."""
    domain = _InstanceFile(lambda: CONTROL_DIR.parent / "xen", ".cfg")
    """The configuration that xl got at the last start; only Xen instances have one."""
    runtime = _InstanceFile(lambda: RUNTIME_DIR, ".json")
    """The runtime file."""
    console_pipe = _InstanceFile(lambda: CONSOLE_DIR)
    """The pipe that takes the guest's output."""
    console_log = _InstanceFile(lambda: CONSOLE_LOG_DIR, ".log")
    """The log of the serial line."""
    previous_console_log = _InstanceFile(lambda: CONSOLE_LOG_DIR, ".log.1")
    """The log before."""
    uefi_variables = _InstanceFile(lambda: UEFI_DIR, ".fd")
    """The UEFI variables, if there are any."""

    def sockets(self) -> tuple[Path, ...]:
        """The sockets of QEMU."""
        return (self.qmp, self.events, self.unit, self.serial, self.agent)
