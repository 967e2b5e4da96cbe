"""The measuring process, in the node: round after round, one contender after the other.

Run as `python3 -m bench.watcher.rounds PLAN`; takes a Plan and writes Results, both as JSON.
"""

import contextlib
import json
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import machine
from bench.commands import timed
from bench.errors import BenchError
from bench.measurer import main, tell
from bench.turns import turned
from bench.watcher.results import (
    DRY,
    HELP,
    LIST,
    PASS,
    PYTHON,
    SHOW,
    SHOW_SOME,
    XL,
    Plan,
    Results,
    Scene,
)
from brine.common.peer import PREFIX, unit_of
from brine.instance.operations import define_instance
from brine.instance.store import spec_file_of
from brine.instance.xen.config import configuration

_UNITS = f"{PREFIX}*.service"
_DROP_IN = Path("/run/systemd/system", f"{PREFIX}.service.d", "bench.conf")
# systemd knows as much of a process that sleeps as of a QEMU, and 200 of them fit anywhere.
_SLEEPS = """[Service]
ExecStart=
ExecStart=/bin/sleep infinity
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
_PROPERTIES = "Id,ActiveState,SubState,MainPID,Result,ExecMainStatus,InvocationID"
_COMMANDS: dict[str, Sequence[str]] = {
    PYTHON: ["/usr/bin/python3", "-c", "pass"],
    HELP: HELP.split(),
    SHOW: ["systemctl", "show", "--", _UNITS],
    SHOW_SOME: ["systemctl", "show", f"--property={_PROPERTIES}", "--", _UNITS],
    LIST: LIST.split(),
    DRY: DRY.split(),
    PASS: PASS.split(),
}


def measure(plan: Plan) -> Results:
    """All scenes."""
    if plan.domains:
        return _measure_domains(plan)
    names = [f"bench{number:03}" for number in range(plan.instances)]
    machine.lead_own_group()
    # Who is asked is as quick as who asks.
    with contextlib.suppress(OSError):
        Path("/proc/1/autogroup").write_text("-20", encoding="ascii")
    _DROP_IN.parent.mkdir(parents=True)
    _DROP_IN.write_text(_SLEEPS, encoding="ascii")
    _systemctl("daemon-reload")
    results = Results()
    for scene, running in ((Scene.DOWN, 0), (Scene.SOME, plan.some), (Scene.RUNNING, len(names))):
        tell(f"{scene}: {len(names)} instances")
        _define(names, running)
        if running:
            _systemctl("start", *(unit_of(name) for name in names[:running]))
        results.samples[scene] = _rounds(plan, _COMMANDS)
    return results


def _measure_domains(plan: Plan) -> Results:
    """Domains that are paused from the start: they take no time of the one processor."""
    for number in range(plan.domains):
        name = f"bench{number:03}"
        tell(f"domain {number + 1} of {plan.domains}")
        spec = define_instance({**_DOMAIN, "name": name}).spec
        file = Path("/run", f"{name}.cfg")
        file.write_text(configuration(spec), encoding="utf-8")
        _run("xl", "create", "-p", str(file))
    commands = {XL: XL.split(), **_COMMANDS}
    return Results({Scene.XEN: _rounds(plan, commands)})


def _define(names: Sequence[str], running: int) -> None:
    first = names[0]
    define_instance({**_SPEC, "name": first})
    spec = json.loads(spec_file_of(first).read_bytes())
    for number, name in enumerate(names):
        state = "up" if number < running else "down"
        data = {**spec, "name": name, "uuid": str(uuid.uuid4()), "admin_state": state}
        spec_file_of(name).write_text(json.dumps(data, indent=2), encoding="utf-8")


def _rounds(plan: Plan, commands: Mapping[str, Sequence[str]]) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for command in commands.values():
        timed(command)
    for number in range(plan.rounds):
        tell(f"round {number + 1} of {plan.rounds}")
        for name, command in turned(list(commands.items()), number):
            samples[name].append(timed(command))
    return samples


def _systemctl(*arguments: str) -> None:
    _run("systemctl", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        text = f"{' '.join(command[:2])}: {done.stderr.strip()}"
        raise BenchError(text, hint="see its journal")


if __name__ == "__main__":
    sys.exit(main(Plan, measure))
