"""The files of a running instance in the control directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from brine.common import paths

BELIEVED_S = 600.0
"""So long after its time a guest that was told to shut down may still do so on the admin's behalf:
brine-kvmd's own default (powerdown_stale_s)."""


@dataclass(frozen=True, slots=True)
class Control:
    """Where an instance's files are.

    :param qmp: socket for tools and people; *events* is kvmd's own.
    :param serial: socket of the serial line.
    :param agent: socket of the guest agent.
    :param stopping: is there while somebody stops the instance on the admin's behalf.
    :param shutdown: is there when the instance's user has shut it down; kvmd makes it.
    :param started: is there when the instance has run since the node's start.
    """

    qmp: Path
    events: Path
    serial: Path
    agent: Path
    stopping: Path
    shutdown: Path
    started: Path

    def sockets(self) -> tuple[Path, ...]:
        """What QEMU listens at."""
        return (self.qmp, self.events, self.serial, self.agent)


def domain_file(name: str) -> Path:
    """What xl was given when an instance of Xen's started; there is none of any other."""
    return paths.CONTROL_DIR.parent / "xen" / f"{name}.cfg"


def asked_file(name: str) -> Path:
    """Is there when the guest of an instance of Xen's was told to shut down, and did not in time;
    made just then."""
    return domain_file(name).with_suffix(".asked")


def up_file(name: str) -> Path:
    """Is there when the last start of an instance of Xen's has succeeded."""
    return domain_file(name).with_suffix(".up")


def reboot_file(name: str) -> Path:
    """Is there when an admin has an instance reboot, which it has not yet; held by who waits for
    that, and made as late as its guest may take to shut down."""
    return paths.CONTROL_DIR.parent / "reboot" / name


def control_of(name: str) -> Control:
    """The files of the instance of that name."""
    folder = paths.CONTROL_DIR
    return Control(
        qmp=folder / f"{name}.qmp",
        events=folder / f"{name}.kvmd",
        serial=folder / f"{name}.serial",
        agent=folder / f"{name}.agent",
        stopping=folder / f"{name}.stopping",
        shutdown=folder / f"{name}.shutdown",
        started=folder / f"{name}.started",
    )
