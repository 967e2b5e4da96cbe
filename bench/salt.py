"""The cost of Salt without work to do: a run, beside `test.nop`, and a minion's beacon."""

import json
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from bench import machine
from bench.copies import replace_programs
from bench.harness import Plan, Report, Table, TableRow, in_turns, tell, timed, timing
from lab.errors import LabError
from lab.machine import Host
from lab.salt import STATES, apply_state, give_states

LIMIT = 1.5
BEACON_LIMIT_PERCENT = 0.1
INSTANCES = 50
"""A trial has a tenth."""
STATES_PER_INSTANCE = 2

BEACON = "the beacon brine, of one core"

_RUN = ["/usr/local/bin/salt-call", "--local", "--out=json", "state.apply"]
_INSTANCE = {
    "accel": "tcg",
    "memory_mib": 128,
    "admin_state": "up",
    "nics": [{"link": "br0"}],
}
# A minion that has no master: it does what one that waits for its master's commands does.
_MINION = {"master_type": "disable", "file_client": "local", "module_dirs": [STATES]}
_BEACONS: Mapping[str, Any] = {"with it": {"brine": []}, "without": {}}
_START_LIMIT_S = 120.0
_CALM_PERCENT = 10.0


def measure(plan: Plan) -> Report:
    """A node whose packages, settings, units and instances are as pillar has them."""
    machine.lead_own_group()
    machine.favour("systemd")
    instances = INSTANCES // plan.pick(1, 1, 10)
    states = STATES_PER_INSTANCE * instances
    _converge(instances, states)
    ours, peer = f"state.apply brine, {instances} instances that run", f"{states} states test.nop"
    contenders = timing({ours: [*_RUN, "brine"], peer: [*_RUN, "nothing"]})
    samples = in_turns("salt", plan.rounds, contenders, warm_up=True)
    nothing = TableRow.of_times(peer, samples[peer])
    brine = TableRow.of_times(ours, samples[ours]).beside(nothing, "").at_most(LIMIT)
    heads = [*machine.description("systemd"), f"rounds: {plan.rounds}"]
    idle = _idle_percents(plan.pick(60.0, 15.0, 2.0))
    beacon = TableRow(BEACON, "%", (idle["with it"] - idle["without"], *idle.values()))
    tables = [
        Table("a run that changes nothing", [brine, nothing]),
        Table(
            "a minion that has nothing to do",
            [beacon.within(BEACON_LIMIT_PERCENT)],
            ("difference", *(f"minion {kind}" for kind in _BEACONS)),
        ),
    ]
    return Report(heads, tables, {**samples, "idle_percent": idle})


def _converge(count: int, states: int) -> None:
    """Have Salt make everything, and check that another run finds nothing to do."""
    timed(["ip", "link", "add", "br0", "type", "bridge"])
    # systemd knows as much of a process that sleeps as of a QEMU, and 50 of them fit anywhere.
    replace_programs("/bin/sleep infinity")
    host = Host()
    instances = {f"bench{number:02}": _INSTANCE for number in range(count)}
    give_states(host, {"brine": {"instance": {"instances": instances}}})
    nops: dict[str, Any] = {f"nothing{number}": {"test.nop": []} for number in range(states)}
    host.write(f"{STATES}/nothing.sls", json.dumps(nops))
    tell(f"making {count} instances")
    apply_state(host)
    apply_state(host, "nothing")
    if changed := [one.name for one in apply_state(host) if one.changes]:
        raise LabError(f"a second run changes {', '.join(changed)}")


def _idle_percents(look_s: float) -> dict[str, float]:
    """The share of a core that two idle minions use, side by side: one with Brine's beacon, and
    one without any."""
    units = {kind: f"bench-minion-{number}" for number, kind in enumerate(_BEACONS)}
    for kind, unit in units.items():
        _start_minion(unit, _BEACONS[kind])
    tell("waiting for two minions to have started")
    limit = time.monotonic() + _START_LIMIT_S
    while max(_percents(units, 5.0).values()) > _CALM_PERCENT:
        if time.monotonic() > limit:
            raise LabError("minions that have nothing to do are busy")
    tell(f"looking at two minions for {look_s:.0f} s")
    found = _percents(units, look_s)
    timed(["systemctl", "stop", *units.values()])
    return found


def _start_minion(unit: str, beacons: Mapping[str, Any]) -> None:
    """Start a minion that shares no file with another one."""
    folder = f"/srv/{unit}"
    options = {**_MINION, "id": unit, "root_dir": folder, "beacons": beacons}
    Host().write(f"{folder}/minion", json.dumps(options))
    run = ["systemd-run", "--quiet", f"--unit={unit}", "--property=CPUAccounting=yes"]
    timed([*run, "/usr/local/bin/salt-minion", f"--config-dir={folder}"])


def _percents(units: Mapping[str, str], look_s: float) -> dict[str, float]:
    """The share of a core that each unit uses meanwhile."""
    began_at = time.perf_counter()
    before = {kind: _cpu_s(unit) for kind, unit in units.items()}
    time.sleep(look_s)
    took_s = time.perf_counter() - began_at
    return {kind: 100 * (_cpu_s(unit) - before[kind]) / took_s for kind, unit in units.items()}


def _cpu_s(unit: str) -> float:
    show = ["systemctl", "show", "--property=CPUUsageNSec", "--value", unit]
    return int(subprocess.check_output(show, text=True)) / 1e9
