"""When the lifecycle handler sees that an owner is gone, and what it takes of a processor."""

import contextlib
import itertools
import json
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from bench import machine
from bench.copies import define_copies, replace_programs
from bench.harness import (
    UNITS,
    Plan,
    Report,
    Round,
    Table,
    TableRow,
    percentiles,
    tell,
    timed,
    turned,
)
from brine.common import paths
from brine.instance.owner import WATCHDOG, folder_of
from brine.vm.unit_name import unit_of
from lab.errors import LabError

LIMIT_SIZE, LIMIT_PERCENT = 1000, 1
"""The target is for this many owned VMs."""
INTERVAL_S, TIMEOUT_S = 5, 10
GONE = 50
"""So many owners at most go away."""


SHARE = "of a processor"


class WatchMethod(StrEnum):
    """The contender that looks after the owners."""

    HANDLER = "brine-lifecycle"
    SHELL = "a loop of stat"
    SYSTEMD = "WatchdogSec="


_FOLDER = Path("/run/bench")
_HANDLER = ("brine-lifecycle.path", "brine-lifecycle.service")
_SHELL = "bench-shell.service"
_SPEC = {"accel": "tcg", "memory_mib": 128, "shutdown_timeout": 1}
_PATIENCE_S = {WatchMethod.HANDLER: 5.0, WatchMethod.SHELL: 20.0, WatchMethod.SYSTEMD: 5.0}
_SETTLE_S = 3.0

# What units and systemd run; the handler looks for a run's marker, of a process in its unit.
_SCRIPTS = {
    "instance": f"""umask 022
cd {paths.MARKS_DIR}
printf '{{"run": "%s", "pid": %d}}' "$INVOCATION_ID" $$ >"$1.new"
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
        [ $((now - touched)) -le {TIMEOUT_S} ] || echo "${{folder##*/}}"
    done
    sleep 1
done
""",
}
_RUN = f"/bin/sh {_FOLDER}/{{script}}.sh %i"
_WATCHDOG_UNIT = f"""[Service]
Type=exec
NotifyAccess=all
WatchdogSec={TIMEOUT_S}
LimitCORE=0
ExecStart={_RUN.format(script="watchdog")}
"""
_SHELL_UNIT = f"[Service]\nExecStart={_RUN.format(script='shell')}\n"
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class OwnerContender:
    """A contender that looks after owners.

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


def contender(way: WatchMethod, names: Sequence[str]) -> OwnerContender:
    """All that is needed of a way."""
    match way:
        case WatchMethod.HANDLER:
            units = [*_HANDLER, *map(unit_of, names)]
            gone = ["BRINE_EVENT=owner-gone"]
            return OwnerContender(units, _HANDLER, _HANDLER[1], touch_file, gone, "BRINE_INSTANCE")
        case WatchMethod.SHELL:
            gone = [f"_SYSTEMD_UNIT={_SHELL}"]
            return OwnerContender([_SHELL], [_SHELL], _SHELL, touch_file, gone, "MESSAGE")
        case WatchMethod.SYSTEMD:
            units = [f"bench-watchdog@{name}.service" for name in names]
            gone = ["_PID=1", "UNIT_RESULT=watchdog"]
            return OwnerContender(
                units, units, "", partial(notify, socket_of_systemd()), gone, "UNIT"
            )


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


def measure(plan: Plan) -> Report:
    """All sizes and ways."""
    machine.lead_own_group()
    machine.favour("systemd")
    timed(["systemctl", "stop", *_HANDLER])
    _FOLDER.mkdir()
    for name, script in _SCRIPTS.items():
        Path(_FOLDER, f"{name}.sh").write_text(script, encoding="ascii")
    Path(UNITS, "bench-watchdog@.service").write_text(_WATCHDOG_UNIT, encoding="ascii")
    Path(UNITS, _SHELL).write_text(_SHELL_UNIT, encoding="ascii")
    replace_programs(_RUN.format(script="instance"))
    rounds = []
    for size in plan.sizes:
        names = [f"bench{number:04}" for number in range(size)]
        define_copies({**_SPEC, "owner": {"watchdog_timeout": TIMEOUT_S}}, names, size)
        timed(["brine", "lifecycle", "prepare", "--all"])
        for number in range(plan.rounds):
            for way in turned(list(WatchMethod), number):
                tell(f"{size:,} VMs, round {number + 1} of {plan.rounds}: {way}")
                result = Round(way, size)
                try:
                    _measure(result, way, names, plan.pick(20.0, 5.0, 1.0))
                except (LabError, OSError) as error:
                    result.troubles.append(str(error))
                rounds.append(result)
    heads = [*machine.description("systemd"), f"rounds: {plan.rounds}"]
    peers = [WatchMethod.SHELL, WatchMethod.SYSTEMD]
    return Report.of_rounds(heads, tables(rounds, plan.sizes), rounds, of="VMs", peers=peers)


def _measure(result: Round, way: WatchMethod, names: Sequence[str], window_s: float) -> None:
    who = contender(way, names)
    owners = Owners(names, who.touch, INTERVAL_S)
    try:
        _start(who.units, owners)
        owners.live_for(_SETTLE_S)
        # Of systemd itself, not of what it runs.
        used_s = partial(machine.cpu_s, who.process(), with_children=bool(who.watcher))
        before_s, began_s = used_s(), time.monotonic()
        owners.live_for(window_s)
        result.numbers[SHARE] = (used_s() - before_s) / (time.monotonic() - began_s)
        owners.gone |= set(names[:: max(len(names) // GONE, 1)])
        owners.live_for(INTERVAL_S + TIMEOUT_S + _PATIENCE_S[way])
        seen_at = _seen_at(who, began_s)
    finally:
        timed(["systemctl", "stop", *who.ends])
        for name in names:
            (_FOLDER / name).unlink(missing_ok=True)
    if early := seen_at.keys() - owners.gone:
        raise LabError(f"seen to be gone, and were not: {len(early)}", hint="is it busy? try again")
    late_s = [at_s - owners.touched_at[name] - TIMEOUT_S for name, at_s in seen_at.items()]
    if found := percentiles(late_s):
        result.numbers |= {"p50": found[49], "p99": found[98]}
    if missed := len(owners.gone) - len(late_s):
        result.troubles.append(f"{missed} owners that were gone were not seen to be")


def _start(units: Sequence[str], owners: Owners) -> None:
    """Start units, while all owners live."""
    process = subprocess.Popen(["systemctl", "start", *units])
    owners.live(lambda: process.poll() is not None)
    if process.returncode:
        raise LabError(f"{len(units)} units did not start", hint="its message is above")


def _seen_at(who: OwnerContender, since_s: float) -> dict[str, float]:
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


# ---- the tables


def tables(rounds: Sequence[Round], sizes: Sequence[int]) -> Iterator[Table]:
    """All that was measured."""
    ways = tuple(WatchMethod)
    shares, times = [], []
    for size in sizes:
        here = [one for one in rounds if one.size == size]
        row = TableRow.of_rounds(f"{size:,} VMs", "%", here, ways, SHARE)
        shares.append(row.within(LIMIT_PERCENT) if size == LIMIT_SIZE else row)
        times.append(TableRow.of_rounds(f"{size:,} VMs, p50", "ms", here, ways, "p50"))
        times.append(TableRow.of_rounds("  p99", "ms", here, ways, "p99"))
    yield Table(f"{SHARE}, a touch each {INTERVAL_S} s", shares, ways)
    yield Table(f"from the end of the timeout, {TIMEOUT_S} s", times, ways)
