"""The paths of the files of an instance, except its spec."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from brine.common import markers, paths
from brine.common.markers import MarkerKind

BELIEVED_S = 600.0
"""So long after its time a guest that was told to shut down may still do so on the admin's behalf:
brine-kvmd's own default (powerdown_stale_s)."""

UNIT_FOLDER = "unit"
"""Beside the control directory: the folder of the sockets for what instances' units run."""


@dataclass(frozen=True, slots=True)
class Control:
    """Where an instance's files are.

    :param qmp: socket for tools and people; *events* is kvmd's own.
    :param unit: socket for what the unit runs, in a folder that only root enters: whoever keeps
        *qmp* busy does not keep a guest from being asked to shut down.
    :param serial: socket of the serial line.
    :param agent: socket of the guest agent.
    :param stopping: an empty file, by which others say what the marker of a stop says; nothing of
        ours believes it, as a whole group may write there.
    :param shutdown: an empty file, by which kvmd tells others what the marker of a shutdown says.
    """

    qmp: Path
    events: Path
    unit: Path
    serial: Path
    agent: Path
    stopping: Path
    shutdown: Path

    def sockets(self) -> tuple[Path, ...]:
        """The sockets of QEMU."""
        return (self.qmp, self.events, self.unit, self.serial, self.agent)


def domain_file(name: str) -> Path:
    """The configuration that xl got at the last start; only Xen instances have one."""
    return paths.CONTROL_DIR.parent / "xen" / f"{name}.cfg"


def control_of(name: str) -> Control:
    """The files of the instance of that name."""
    folder = paths.CONTROL_DIR
    return Control(
        qmp=folder / f"{name}.qmp",
        events=folder / f"{name}.kvmd",
        unit=folder.parent / UNIT_FOLDER / f"{name}.qmp",
        serial=folder / f"{name}.serial",
        agent=folder / f"{name}.agent",
        stopping=folder / f"{name}.stopping",
        shutdown=folder / f"{name}.shutdown",
    )


def pipe_of(name: str) -> Path:
    """The pipe that takes what the guest of an instance says."""
    return paths.CONSOLE_DIR / name


def log_of(name: str) -> Path:
    """The log of an instance."""
    return paths.CONSOLE_LOG_DIR / f"{name}.log"


def previous_log_of(name: str) -> Path:
    """The previous log of an instance."""
    return paths.CONSOLE_LOG_DIR / f"{name}.log.1"


def uefi_variables_of(name: str) -> Path:
    """The UEFI variables of an instance, if there are any."""
    return paths.UEFI_DIR / f"{name}.fd"


def forget_user_shutdown(name: str) -> None:
    """Remove the markers of a user's shutdown.

    :raises OSError: if that can't be removed.
    """
    markers.remove_marker(MarkerKind.SHUTDOWN, name)
    markers.clear_way(control_of(name).shutdown)
