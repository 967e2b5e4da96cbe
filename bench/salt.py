"""What a run of Salt costs that finds nothing to do, beside one of states that do nothing."""

import json
from typing import Any

from bench import machine
from bench.copies import replace_programs
from bench.harness import Plan, Report, Table, TableRow, in_turns, tell, timed, timing
from lab.errors import LabError
from lab.machine import Host
from lab.salt import STATES, apply_state, give_states

LIMIT = 1.5
INSTANCES, STATES_OF_NOTHING = 50, 100

BRINE = f"state.apply brine, {INSTANCES} instances that run"
NOTHING = f"{STATES_OF_NOTHING} states test.nop"

_RUN = ["/usr/local/bin/salt-call", "--local", "--out=json", "state.apply"]
_INSTANCE = {
    "accel": "tcg",
    "memory_mib": 128,
    "admin_state": "up",
    "nics": [{"link": "br0"}],
}


def measure(plan: Plan) -> Report:
    """A node whose packages, settings, units and instances are as pillar has them."""
    machine.lead_own_group()
    machine.favour("systemd")
    _converge()
    contenders = timing({BRINE: [*_RUN, "brine"], NOTHING: [*_RUN, "nothing"]})
    samples = in_turns("salt", plan.rounds, contenders, warm_up=True)
    nothing = TableRow.of_times(NOTHING, samples[NOTHING])
    brine = TableRow.of_times(BRINE, samples[BRINE]).beside(nothing, "").at_most(LIMIT)
    heads = [*machine.description("systemd"), f"rounds: {plan.rounds}"]
    return Report(heads, [Table("a run that changes nothing", [brine, nothing])], samples)


def _converge() -> None:
    """Have Salt make everything, and check that another run finds nothing to do."""
    timed(["ip", "link", "add", "br0", "type", "bridge"])
    # systemd knows as much of a process that sleeps as of a QEMU, and 50 of them fit anywhere.
    replace_programs("/bin/sleep infinity")
    host = Host()
    instances = {f"bench{number:02}": _INSTANCE for number in range(INSTANCES)}
    give_states(host, {"brine": {"instance": {"instances": instances}}})
    nops: dict[str, Any] = {
        f"nothing{number}": {"test.nop": []} for number in range(STATES_OF_NOTHING)
    }
    host.write(f"{STATES}/nothing.sls", json.dumps(nops))
    tell(f"making {INSTANCES} instances")
    apply_state(host)
    apply_state(host, "nothing")
    if changed := [one.name for one in apply_state(host) if one.changes]:
        raise LabError(f"a second run changes {', '.join(changed)}")
