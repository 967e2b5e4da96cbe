"""Lists of many instances, some of which run."""

import contextlib
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import machine
from bench.commands import timed
from bench.instance import guests
from bench.instance.results import (
    BRINE_LIST,
    BRINE_LIST_JSON,
    PASS,
    READ_SPECS,
    SYSTEMCTL_SHOW,
    USUAL_IMPORTS,
    VIRSH_LIST,
    Plan,
)
from brine.instance.operations import define_instance
from brine.instance.store import FOLDER

_PYTHON = "/usr/bin/python3"  # the interpreter that the package's commands name
_READ = "import json, pathlib; [json.loads(f.read_bytes()) for f in pathlib.Path({!r}).iterdir()]"


def of_lists() -> dict[str, Callable[[], float]]:
    """All that list, and what can't be less."""
    lines: dict[str, Sequence[str]] = {
        PASS: [_PYTHON, "-c", "pass"],
        USUAL_IMPORTS: [_PYTHON, "-c", USUAL_IMPORTS],
        READ_SPECS: [_PYTHON, "-c", _READ.format(str(FOLDER))],
        SYSTEMCTL_SHOW: ["systemctl", "show", "--", "brine-instance@*.service"],
        BRINE_LIST: BRINE_LIST.split(),
        BRINE_LIST_JSON: BRINE_LIST_JSON.split(),
        VIRSH_LIST: VIRSH_LIST.split(),
    }
    return {name: _command(line) for name, line in lines.items()}


def populate(plan: Plan) -> None:
    """Define instances and domains, and start some of them."""
    orders = []
    for number in range(plan.instances):
        define_instance(guests.listed_spec(plan, number))
        file = Path(plan.images, f"{guests.listed_name(number)}.xml")
        file.write_text(guests.listed_xml(plan, number), encoding="utf-8")
        orders.append(f"define {file}")
    orders += [f"start --paused {guests.listed_name(number)}" for number in range(plan.running)]
    timed(["virsh", "--quiet", "; ".join(orders)])
    timed(["brine", "instance", "start", "--all"])


def favour() -> None:
    """Have what lists, and those whom it asks, well ahead of the machine's other work.

    Of starts that can't be had: of a unit, or a domain, each process is in a group of its own; see
    machine.lead_own_group().
    """
    machine.lead_own_group()
    for daemon in ("libvirtd", "systemd"):
        found = subprocess.run(["pidof", daemon], capture_output=True, text=True, check=True)
        for pid in found.stdout.split():
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/autogroup").write_text("-20", encoding="ascii")


def _command(line: Sequence[str]) -> Callable[[], float]:
    return lambda: timed(line)
