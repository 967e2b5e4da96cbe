"""Salt on a node that is its own master, as `salt-call --local` has it. See also `lab.fleet`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.errors import LabError
from lab.machine import Machine
from lab.repository import publish
from lab.tree import TREE

STATES = "/srv/salt/states"
PILLAR = "/srv/salt/pillar"

_MINION = {
    "file_client": "local",
    "file_roots": {"base": [STATES]},
    "pillar_roots": {"base": [PILLAR]},
}


@dataclass(frozen=True)
class StateResult:
    """The result of one state: `result` is None if test mode would change it."""

    name: str
    result: bool | None
    comment: str
    changes: Mapping[str, Any]


def give_states(machine: Machine, pillar: Mapping[str, Any] | None = None) -> None:
    """Put the tree's Salt states onto a machine, set up a masterless minion, and give it a pillar.

    A second call changes the pillar.
    """
    machine.put(TREE / "salt/states", STATES)
    # JSON is YAML.
    machine.write("/etc/salt/minion.d/local.conf", json.dumps(_MINION, indent=2))
    machine.write(f"{PILLAR}/top.sls", json.dumps({"base": {"*": ["brine"]}}))
    machine.write(f"{PILLAR}/brine.sls", json.dumps(dict(pillar or {}), indent=2))


def apply_state(machine: Machine, state: str = "brine", *, test: bool = False) -> list[StateResult]:
    """`salt-call --local state.apply STATE`, in order; raises LabError when a state fails."""
    args = ["salt-call", "--local", "--out=json", "--log-level=warning", "state.apply", state]
    # Salt exits with 2 when a state failed, and then its output says more than its exit status.
    done = machine.run([*args, f"test={test}"], check=False, timeout_s=300)
    try:
        local = json.loads(done.stdout)["local"]
    except (ValueError, KeyError):
        local = [done.stdout, done.stderr]
    return state_results(local, machine.name, state)


def state_results(answer: Any, minion: str, state: str) -> list[StateResult]:
    """A minion's results of state.apply, in order; raises LabError when a state failed."""
    if not isinstance(answer, dict):
        lines = answer if isinstance(answer, list) else [answer]
        said = "\n".join(f"  | {line}" for line in lines)
        raise LabError(f"salt on {minion} did not apply {state}\n{said}")
    results = [
        StateResult(one["name"], one["result"], one["comment"], one["changes"])
        for one in sorted(answer.values(), key=lambda one: int(one["__run_num__"]))
    ]
    if failed := [result for result in results if result.result is False]:
        said = "\n".join(f"  | {result.name}: {result.comment}" for result in failed)
        raise LabError(f"salt on {minion}: states of {state} failed\n{said}")
    return results


def wire(
    machine: Machine, packages: Iterable[Path], pillar: Mapping[str, Any] | None = None
) -> list[StateResult]:
    """Set a machine up as an operator would: a repository, and the states of `brine`."""
    publish(machine, packages)
    give_states(machine, pillar)
    return apply_state(machine)
