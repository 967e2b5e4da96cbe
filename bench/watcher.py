"""The cost of a pass of the watcher, beside that of its questions alone."""

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench import machine
from bench.copies import define_copies, replace_programs
from bench.harness import Plan, Report, Table, TableRow, in_turns, tell, timed, timing
from brine.instance.registry import define_instance
from brine.instance.xen.config import configuration
from brine.vm.unit_name import unit_of

LIMIT = 1.5
"""A pass, beside asking alone."""
INSTANCES, SOME = 200, 20
"""All, and those that run where some do; a trial has a tenth of both."""
DOMAINS = 20

PASS = "brine watcher run"
LIST = "brine instance list"
SHOW = "systemctl show, of all instances' units"
XL = "xl list -v"

_UNITS = "brine-instance@*.service"
_PROPERTIES = "Id,ActiveState,SubState,MainPID,Result,ExecMainStatus,InvocationID"
COMMANDS: Mapping[str, Sequence[str]] = {
    SHOW: ["systemctl", "show", "--", _UNITS],
    "the same, of what Brine wants to know": [
        *("systemctl", "show", f"--property={_PROPERTIES}", "--", _UNITS)
    ],
    LIST: LIST.split(),
    PASS: PASS.split(),
}

_IMAGE = Path("/var/lib/bench.img")
_SPEC = {
    "accel": "tcg",
    "memory_mib": 128,
    "disks": [{"path": str(_IMAGE)}],
    "nics": [{"link": "br0"}],
}
_DOMAIN = {
    "hypervisor": "xen-pvm",
    "kernel": "/srv/domain/kernel",
    "memory_mib": 72,
    "admin_state": "up",
}

Samples = Mapping[str, Sequence[float]]
"""Seconds, in the order of the rounds, by what was run."""


def measure(plan: Plan) -> Report:
    """Instances of which none, some and all run, or domains; nothing is to be done about any."""
    samples: dict[str, Samples] = {}
    tables = []
    for scene, few_run, found in _of_domains(plan) if plan.on_xen else _of_instances(plan):
        samples[scene] = found
        # Where few run, systemctl has hardly anything to ask for.
        tables.append(Table(scene, list(_rows(found, 1 if few_run else 2))))
    heads = [*machine.description("systemd"), f"rounds: {plan.rounds}"]
    return Report(heads, tables, samples)


def _of_instances(plan: Plan) -> Iterator[tuple[str, bool, Samples]]:
    """The scenes: the title, whether few run, and what was measured."""
    part = plan.pick(1, 1, 10)
    names = [f"bench{number:03}" for number in range(INSTANCES // part)]
    all_, some = len(names), SOME // part
    timed(
        ["systemctl", "disable", "--now", "brine-watcher.timer"],
        ["ip", "link", "add", "br0", "type", "bridge"],
    )
    _IMAGE.touch()
    os.truncate(_IMAGE, 2**20)
    machine.lead_own_group()
    # Who is asked is as quick as who asks.
    machine.favour("systemd")
    # systemd knows as much of a process that sleeps as of a QEMU, and 200 of them fit anywhere.
    replace_programs("/bin/sleep infinity")
    for how_many, running in (("none runs", 0), (f"{some} run", some), ("all run", all_)):
        scene = f"{all_} instances, {how_many}"
        tell(scene)
        define_copies(_SPEC, names, running)
        if running:
            timed(["systemctl", "start", *map(unit_of, names[:running])])
        found = in_turns(scene, plan.rounds, timing(COMMANDS), warm_up=True)
        yield scene, running < all_, found


def _of_domains(plan: Plan) -> Iterator[tuple[str, bool, Samples]]:
    """Domains that are paused from the start: they take no time of the one processor."""
    for number in range(DOMAINS):
        name = f"bench{number:03}"
        tell(f"domain {number + 1} of {DOMAINS}")
        spec = define_instance({**_DOMAIN, "name": name}).spec
        file = Path("/run", f"{name}.cfg")
        file.write_text(configuration(spec), encoding="utf-8")
        timed(["xl", "create", "-p", str(file)])
    scene = f"{DOMAINS} domains of an emulated Xen's"
    commands = timing({XL: XL.split(), **COMMANDS})
    yield scene, False, in_turns(scene, plan.rounds, commands, warm_up=True)


def _rows(samples: Samples, targets: int) -> Iterator[TableRow]:
    """One command a row.

    :param targets: how many ratios of a pass, from the last on, the target is for.
    """
    # Both are asked on Xen.
    show_s = sum(statistics.median(samples[name]) for name in (SHOW, XL) if name in samples)
    show, list_ = TableRow.of_times("to show", [show_s]), TableRow.of_times(LIST, samples[LIST])
    for name, seconds in samples.items():
        row = TableRow.of_times(name, seconds)
        if name in (LIST, PASS):
            row = row.beside(show, "show").beside(list_, "list")
        yield row.at_most(LIMIT, last=targets) if name == PASS else row
