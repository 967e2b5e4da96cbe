"""Who starts the same guest, each in his own way, and what can't be less."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bench.commands import timed
from bench.instance import guests
from bench.instance.exec_watch import ExecWatch, watched
from bench.instance.guests import name_of, qmp_of
from bench.instance.results import PYTHONS, UNIT, Guest, Plan, Start, Way, series
from bench.instance.stopwatch import timed_start
from brine.common import paths
from brine.instance.operations import define_instance

_QEMU = Path("/usr/bin/qemu-system-x86_64")
_PYTHON = "/usr/bin/python3"
_UNITS = Path("/run/systemd/system")
# A copy, which nobody else executes.
_SLEEP = Path("/srv/sleep")

_UNIT = f"""[Service]
Type=exec
ExecStart={_SLEEP} infinity
"""
# As many as ours has: one becomes the program, one waits for it; the third is the command.
_UNIT_OF_PYTHONS = f"""[Service]
Type=exec
ExecStart={_PYTHON} -I -c 'import os; os.execv("{_SLEEP}", ["sleep", "infinity"])'
ExecStartPost={_PYTHON} -I -c pass
"""
_PYTHONS_SYSTEMCTL = "import subprocess; subprocess.run(['systemctl', 'start', '{unit}'], check=1)"


class Contender(Protocol):
    """Something that starts something."""

    def start(self) -> Start:
        """Start it, with the clock running."""

    def stop(self) -> None:
        """Stop it, whatever that takes."""


@dataclass(frozen=True)
class Command:
    """A command that starts, and one that stops."""

    starting: Sequence[str]
    stopping: Sequence[str]
    program: ExecWatch
    qmp: Path | None = None

    def start(self) -> Start:
        start, _ = timed_start(self.starting, self.program, self.qmp)
        return start

    def stop(self) -> None:
        timed(self.stopping)


@dataclass(frozen=True)
class Alone:
    """QEMU with the arguments that it had when Brine started it last, and nobody else."""

    name: str
    program: ExecWatch
    qmp: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> Start:
        runtime = json.loads((paths.RUNTIME_DIR / f"{self.name}.json").read_bytes())
        command = runtime["command"]
        start, process = timed_start(command, self.program, self.qmp, returns=False)
        self.running.append(process)
        return start

    def stop(self) -> None:
        while self.running:
            process = self.running.pop()
            process.kill()
            process.wait()


def of_guests(plan: Plan, stack: contextlib.ExitStack) -> dict[str, Contender]:
    """All who start a guest."""
    qemu = stack.enter_context(watched(_QEMU))
    found: dict[str, Contender] = {}
    for guest in Guest:
        name, qmp = name_of(guest), qmp_of(guest)
        define_instance(guests.spec(plan, guest))
        found[series(guest, Way.BRINE)] = Command(
            ["brine", "instance", "start", name],
            ["brine", "instance", "stop", "--force", name],
            qemu,
            qmp,
        )
        if guest is Guest.CONFINED:
            continue  # libvirt's always is
        file = Path(plan.images, f"{name}.xml")
        file.write_text(guests.xml(plan, guest), encoding="utf-8")
        timed(["virsh", "define", str(file)])
        starting, stopping = ["virsh", "start", name], ["virsh", "destroy", name]
        found[series(guest, Way.VIRSH)] = Command(starting, stopping, qemu, qmp)
    plain = Alone(name_of(Guest.PLAIN), qemu, qmp_of(Guest.PLAIN))
    return {**found, series(Guest.PLAIN, Way.QEMU): plain}


def of_floors(stack: contextlib.ExitStack) -> dict[str, Contender]:
    """Units that do nothing."""
    shutil.copy("/usr/bin/sleep", _SLEEP)
    sleep = stack.enter_context(watched(_SLEEP))
    one, pythons = "bench-sleep.service", "bench-pythons.service"
    for unit, text in ((one, _UNIT), (pythons, _UNIT_OF_PYTHONS)):
        (_UNITS / unit).write_text(text, encoding="utf-8")
    timed(["systemctl", "daemon-reload"])
    script = _PYTHONS_SYSTEMCTL.format(unit=pythons)
    starting = {UNIT: ["systemctl", "start", one], PYTHONS: [_PYTHON, "-I", "-c", script]}
    return {
        name: Command(command, ["systemctl", "stop", command_unit], sleep)
        for (name, command), command_unit in zip(starting.items(), (one, pythons), strict=True)
    }
