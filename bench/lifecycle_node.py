"""`bench lifecycle`'s measuring process, in the node."""

import contextlib
import itertools
import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import machine
from bench.harness import tell, timed, turned
from bench.lifecycle import Plan, Round, Way
from bench.watcher_node import define_copies, replace_programs
from brine.common import paths
from brine.common.peer import unit_of
from brine.instance.owner import WATCHDOG, folder_of
from lab.errors import LabError

_FOLDER = Path("/run/bench")
_UNITS = Path("/run/systemd/system")
_HANDLER = ("brine-lifecycle.path", "brine-lifecycle.service")
_SHELL = "bench-shell.service"
_SPEC = {"accel": "tcg", "memory_mib": 128, "shutdown_timeout": 1}
_PATIENCE_S = {Way.HANDLER: 5.0, Way.SHELL: 20.0, Way.SYSTEMD: 5.0}
_SETTLE_S = 3.0

# What units and systemd run; the handler looks for a run's marker, of a process in its unit.
_SCRIPTS = {
    "instance": f"""umask 022
cd {paths.MARKS_DIR}
printf '{{{{"run": "%s", "pid": %d}}}}' "$INVOCATION_ID" $$ >"$1.new"
mv "$1.new" "$1.start"
exec sleep infinity
""",
    "watchdog": f"""cd {_FOLDER}
echo $$ >"$1.new"
mv "$1.new" "$1"
exec sleep infinity
""",
    "shell": f"""while :; do
    now=$(date +%s)
    for folder in {paths.LIFECYCLE_DIR}/*; do
        touched=$(stat -c %Y "$folder/{WATCHDOG}")
        [ $((now - touched)) -le {{timeout_s}} ] || echo "${{{{folder##*/}}}}"
    done
    sleep 1
done
""",
}
_RUN = f"/bin/sh {_FOLDER}/{{script}}.sh %i"
_WATCHDOG_UNIT = f"""[Service]
Type=exec
NotifyAccess=all
WatchdogSec={{timeout_s}}
LimitCORE=0
ExecStart={_RUN.format(script="watchdog")}
"""
_SHELL_UNIT = f"[Service]\nExecStart={_RUN.format(script='shell')}\n"
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Contender:
    """Who looks after owners.

    :param units: whose start is the start of everything.
    :param ends: units that stop afterwards.
    :param watcher: the unit whose main process it is; empty if it is systemd.
    :param touch: what the owner of a name does each interval.
    :param records: which records of the journal say that an owner is gone.
    :param field: of these, which names it.
    """

    units: Sequence[str]
    ends: Sequence[str]
    watcher: str
    touch: Callable[[str], object]
    records: Sequence[str]
    field: str

    def process(self) -> int:
        """The number of its process."""
        if not self.watcher:
            return 1
        show = ["systemctl", "show", "--property=MainPID", "--value", self.watcher]
        return int(subprocess.run(show, stdout=subprocess.PIPE, check=True).stdout)


def contender(way: Way, names: Sequence[str]) -> Contender:
    """All that is needed of a way."""
    match way:
        case Way.HANDLER:
            units = [*_HANDLER, *map(unit_of, names)]
            gone = ["BRINE_EVENT=owner-gone"]
            return Contender(units, _HANDLER, _HANDLER[1], touch_file, gone, "BRINE_INSTANCE")
        case Way.SHELL:
            gone = [f"_SYSTEMD_UNIT={_SHELL}"]
            return Contender([_SHELL], [_SHELL], _SHELL, touch_file, gone, "MESSAGE")
        case Way.SYSTEMD:
            units = [f"bench-watchdog@{name}.service" for name in names]
            gone = ["_PID=1", "UNIT_RESULT=watchdog"]
            return Contender(units, units, "", partial(notify, socket_of_systemd()), gone, "UNIT")


def touch_file(name: str) -> None:
    """Reset a watchdog as its owner does."""
    (folder_of(name) / WATCHDOG).touch()


def socket_of_systemd() -> socket.socket:
    """A socket that is connected to where systemd hears of its services."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    found.connect("/run/systemd/notify")
    return found


def notify(systemd: socket.socket, name: str) -> None:
    """Say on behalf of a unit's process that it is alive, as sd_pid_notify(3) does."""
    with contextlib.suppress(OSError):  # it has not started yet
        pid = int((_FOLDER / name).read_text())
        sender = socket.SOL_SOCKET, socket.SCM_CREDENTIALS, _CREDENTIALS.pack(pid, 0, 0)
        systemd.sendmsg([b"WATCHDOG=1"], [sender])


class Owners:
    """All owners, one after the other, so that their touches are spread over the interval."""

    def __init__(
        self, names: Sequence[str], touch: Callable[[str], object], interval_s: float
    ) -> None:
        self._turns = itertools.cycle(names)
        self._touch = touch
        self._pause_s = interval_s / len(names)
        self._due_s = time.monotonic()
        self.gone: set[str] = set()
        self.touched_at = dict.fromkeys(names, 0.0)
        """By the monotonic clock."""
        for name in names:
            touch(name)

    def live(self, is_over: Callable[[], bool]) -> None:
        """Touch until that is so."""
        while not is_over():
            name = next(self._turns)
            if name not in self.gone:
                self._touch(name)
                self.touched_at[name] = time.monotonic()
            self._due_s += self._pause_s
            time.sleep(max(self._due_s - time.monotonic(), 0))

    def live_for(self, seconds: float) -> None:
        """Touch for so long."""
        until_s = time.monotonic() + seconds
        self.live(lambda: time.monotonic() >= until_s)


def measure(plan: Plan) -> list[Round]:
    """All sizes and ways."""
    machine.lead_own_group()
    machine.favour([1])
    timed(["systemctl", "stop", *_HANDLER])
    _FOLDER.mkdir()
    for name, script in _SCRIPTS.items():
        text = script.format(timeout_s=plan.timeout_s)
        Path(_FOLDER, f"{name}.sh").write_text(text, encoding="ascii")
    unit = _WATCHDOG_UNIT.format(timeout_s=plan.timeout_s)
    Path(_UNITS, "bench-watchdog@.service").write_text(unit, encoding="ascii")
    Path(_UNITS, _SHELL).write_text(_SHELL_UNIT, encoding="ascii")
    replace_programs(_RUN.format(script="instance"))
    rounds = []
    for size in plan.sizes:
        names = [f"bench{number:04}" for number in range(size)]
        define_copies({**_SPEC, "owner": {"watchdog_timeout": plan.timeout_s}}, names, size)
        timed(["brine", "lifecycle", "prepare", "--all"])
        for number in range(plan.rounds):
            for way in turned(list(Way), number):
                tell(f"{size:,} VMs, round {number + 1} of {plan.rounds}: {way}")
                try:
                    rounds.append(_measure(way, names, plan))
                except (LabError, OSError) as error:
                    rounds.append(Round(way, size, trouble=str(error)))
    return rounds


def _measure(way: Way, names: Sequence[str], plan: Plan) -> Round:
    who = contender(way, names)
    owners = Owners(names, who.touch, plan.interval_s)
    try:
        _start(who.units, owners)
        owners.live_for(_SETTLE_S)
        process = who.process()
        before_s, began_s = _used_s(process), time.monotonic()
        owners.live_for(plan.window_s)
        share = (_used_s(process) - before_s) / (time.monotonic() - began_s)
        owners.gone |= set(names[:: max(len(names) // plan.gone, 1)])
        owners.live_for(plan.interval_s + plan.timeout_s + _PATIENCE_S[way])
        seen_at = _seen_at(who, began_s)
    finally:
        timed(["systemctl", "stop", *who.ends])
        for name in names:
            (_FOLDER / name).unlink(missing_ok=True)
    if early := seen_at.keys() - owners.gone:
        raise LabError(f"seen to be gone, and were not: {len(early)}", hint="is it busy? try again")
    late_s = [at_s - owners.touched_at[name] - plan.timeout_s for name, at_s in seen_at.items()]
    return Round(way, len(names), share, late_s, len(owners.gone) - len(late_s))


def _start(units: Sequence[str], owners: Owners) -> None:
    """Start units, while all owners live."""
    process = subprocess.Popen(["systemctl", "start", *units])
    owners.live(lambda: process.poll() is not None)
    if process.returncode:
        raise LabError(f"{len(units)} units did not start", hint="its message is above")


def _used_s(process: int) -> float:
    """The processor time of a process, and of what it has run; of systemd, its own."""
    used_s = machine.cpu_s(process)
    if process == 1:
        return used_s
    stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return used_s + (int(stat[13]) + int(stat[14])) / os.sysconf("SC_CLK_TCK")


def _seen_at(who: Contender, since_s: float) -> dict[str, float]:
    """Which owners were first seen to be gone when, by the monotonic clock."""
    timed(["journalctl", "--sync"])
    command = ["journalctl", "--boot", "--output=json", *who.records]
    found: dict[str, float] = {}
    for line in subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout.splitlines():
        record = json.loads(line)
        at_s = int(record["__MONOTONIC_TIMESTAMP"]) / 1e6
        _, _, name = record[who.field].removesuffix(".service").rpartition("@")
        if at_s > since_s:
            found.setdefault(name, at_s)
    return found
