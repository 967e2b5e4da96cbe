"""Where Brine's files are. The design's table of files is the source."""

from __future__ import annotations

from pathlib import Path

ETC_DIR = Path("/etc/brine")
CONTROL_DIR = Path("/run/brine/ctrl")
MARKS_DIR = Path("/run/brine/marks")
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
NIC_SCRIPTS_DIR = ETC_DIR / "nic.d"
KEY_FILE = ETC_DIR / "hmac.key"
PREVIOUS_KEY_FILE = ETC_DIR / "hmac.key.previous"


def settings_file(daemon: str) -> Path:
    """The settings of one daemon, e.g. ``/etc/brine/kvmd.toml`` for ``kvmd``; may be absent."""
    return ETC_DIR / f"{daemon}.toml"


class InstanceFiles:
    """The files of an instance, except its spec and its markers.

    :param name: of the instance.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def qmp(self) -> Path:
        """QEMU's QMP socket for tools and people."""
        return CONTROL_DIR / f"{self._name}.qmp"

    @property
    def events(self) -> Path:
        """QEMU's QMP socket for brine-kvmd."""
        return CONTROL_DIR / f"{self._name}.kvmd"

    @property
    def unit(self) -> Path:
        """QEMU's QMP socket for the unit, in a folder that only root enters: a client that keeps
        *qmp* busy does not keep the guest from being asked to shut down."""
        return CONTROL_DIR.parent / "unit" / f"{self._name}.qmp"

    @property
    def serial(self) -> Path:
        """The socket of the serial line."""
        return CONTROL_DIR / f"{self._name}.serial"

    @property
    def agent(self) -> Path:
        """The socket of the guest agent."""
        return CONTROL_DIR / f"{self._name}.agent"

    def sockets(self) -> tuple[Path, ...]:
        """The sockets of QEMU."""
        return (self.qmp, self.events, self.unit, self.serial, self.agent)

    @property
    def stopping(self) -> Path:
        """An empty file of other programs' stops. Brine itself does not believe it, as a whole
        group may write there."""
        return CONTROL_DIR / f"{self._name}.stopping"

    @property
    def shutdown(self) -> Path:
        """An empty file, which tells other programs of a user's shutdown."""
        return CONTROL_DIR / f"{self._name}.shutdown"

    @property
    def domain(self) -> Path:
        """The configuration that xl got at the last start; only Xen instances have one."""
        return CONTROL_DIR.parent / "xen" / f"{self._name}.cfg"

    @property
    def runtime(self) -> Path:
        """The runtime file."""
        return RUNTIME_DIR / f"{self._name}.json"

    @property
    def console_pipe(self) -> Path:
        """The pipe that takes the guest's output."""
        return CONSOLE_DIR / self._name

    @property
    def console_log(self) -> Path:
        """The log of the serial line."""
        return CONSOLE_LOG_DIR / f"{self._name}.log"

    @property
    def previous_console_log(self) -> Path:
        """The log before."""
        return CONSOLE_LOG_DIR / f"{self._name}.log.1"

    @property
    def uefi_variables(self) -> Path:
        """The UEFI variables, if there are any."""
        return UEFI_DIR / f"{self._name}.fd"
