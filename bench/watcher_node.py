"""`bench watcher`'s measuring process, in the node."""

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import machine
from bench.harness import in_turns, tell, timed, timing
from bench.watcher import COMMANDS, XL, Plan, Results, Scene
from brine.common.peer import PREFIX, unit_of
from brine.instance.operations import define_instance
from brine.instance.store import spec_file_of
from brine.instance.xen.config import configuration

_DROP_IN = Path("/run/systemd/system", f"{PREFIX}.service.d", "bench.conf")
_PROGRAMS = """[Service]
ExecStart=
ExecStart={program}
ExecStartPost=
ExecStop=
ExecStopPost=
"""
_SPEC = {
    "accel": "tcg",
    "memory_mib": 128,
    "disks": [{"path": "/var/lib/bench.img"}],
    "nics": [{"link": "br0"}],
}
_DOMAIN = {
    "hypervisor": "xen-pvm",
    "kernel": "/srv/domain/kernel",
    "memory_mib": 72,
    "admin_state": "up",
}


def measure(plan: Plan) -> Results:
    """All scenes."""
    if plan.domains:
        return _measure_domains(plan)
    names = [f"bench{number:03}" for number in range(plan.instances)]
    machine.lead_own_group()
    # Who is asked is as quick as who asks.
    machine.favour([1])
    # systemd knows as much of a process that sleeps as of a QEMU, and 200 of them fit anywhere.
    replace_programs("/bin/sleep infinity")
    results: Results = {}
    for scene, running in ((Scene.DOWN, 0), (Scene.SOME, plan.some), (Scene.RUNNING, len(names))):
        tell(f"{scene}: {len(names)} instances")
        define_copies(_SPEC, names, running)
        if running:
            timed(["systemctl", "start", *(unit_of(name) for name in names[:running])])
        results[scene] = in_turns(scene, plan.rounds, timing(COMMANDS), warm_up=True)
    return results


def _measure_domains(plan: Plan) -> Results:
    """Domains that are paused from the start: they take no time of the one processor."""
    for number in range(plan.domains):
        name = f"bench{number:03}"
        tell(f"domain {number + 1} of {plan.domains}")
        spec = define_instance({**_DOMAIN, "name": name}).spec
        file = Path("/run", f"{name}.cfg")
        file.write_text(configuration(spec), encoding="utf-8")
        timed(["xl", "create", "-p", str(file)])
    commands = timing({XL: XL.split(), **COMMANDS})
    return {Scene.XEN: in_turns(Scene.XEN, plan.rounds, commands, warm_up=True)}


def replace_programs(program: str) -> None:
    """Have the units of instances run this program, and nothing else."""
    _DROP_IN.parent.mkdir(parents=True)
    _DROP_IN.write_text(_PROGRAMS.format(program=program), encoding="ascii")
    timed(["systemctl", "daemon-reload"])


def define_copies(spec: Mapping[str, Any], names: Sequence[str], running: int) -> None:
    """Define instances of one spec, of which the first ones are to run."""
    first = names[0]
    define_instance({**spec, "name": first})
    written = json.loads(spec_file_of(first).read_bytes())
    for number, name in enumerate(names):
        state = "up" if number < running else "down"
        data = {**written, "name": name, "uuid": str(uuid.uuid4()), "admin_state": state}
        spec_file_of(name).write_text(json.dumps(data, indent=2), encoding="utf-8")
