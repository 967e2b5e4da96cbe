"""The processor that all nodes of a group can give a guest: one model of QEMU's, and flags.

A guest that has it can move live between these nodes. Pure: the nodes' own answers are the input.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from brine.common.errors import BrineError
from brine.common.schema import key, member, parse, shape_of, shown

ANSWERS_HINT = 'such as {"n1": ...}: what brine node cpu --json prints'

_FLAG = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NUMBERS = re.compile(r"(\d+)")
_NESTED = re.compile(
    "vmx(-.*)?|svm(e?-.*)?|avic|decodeassists|flushbyasid|lbrv|npt|nrip-save|pause-filter"
    "|pfthreshold|tsc-scale|v-vmsave-vmload|vgif|vmcb-clean|vnmi"
)
"""Flags of processors that run virtual machines."""


class BaselineError(BrineError):
    """Nodes that have no processor in common."""


def _flag_fault(text: str) -> str | None:
    return None if _FLAG.fullmatch(text) else "is no flag of a processor"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeModel:
    """A model of QEMU's, by a node's answer: all of its *flags*, or none if other nodes may have it
    otherwise."""

    flags: tuple[str, ...] = key((), check=_flag_fault)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCpu:
    """The part of ``brine node cpu --json`` that a baseline needs."""

    accel: str = key(choices=("kvm", "tcg"))
    vendor: str = key()
    flags: tuple[str, ...] = key(check=_flag_fault)
    models: dict[str, NodeModel]


class Baseline(NamedTuple):
    """A processor that several nodes have.

    :param cpu_type: of the cluster's ``hvparams``: the *model*, and what is *removed* from it and
        *added* to it.
    :param flags: all that a guest has then.
    :param lacking: by node, the flags that a guest does not have because this node lacks them, and
        another one has them.
    :param nested: flags that all have, and that no guest gets: those of virtual machines in guests.
    """

    cpu_type: str
    accel: str
    vendor: str
    model: str
    removed: tuple[str, ...]
    added: tuple[str, ...]
    flags: tuple[str, ...]
    lacking: dict[str, tuple[str, ...]]
    nested: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """It as JSON, with what ``brine config apply`` takes of it."""
        hvparams = {"kvm": {"cpu_type": self.cpu_type}}
        return {**self._asdict(), "declaration": {"cluster": {"hvparams": hvparams}}}


def nodes_of(data: Any) -> dict[str, NodeCpu]:
    """The nodes of JSON: by each one's name what ``brine node cpu --json`` has printed there. Keys
    of a newer version are left out.

    :raises SchemaError: what is wrong, of which node.
    """
    if not isinstance(data, dict) or not data:
        text = f"must be an object with an answer of each node, but is {shown(data)}"
        raise BaselineError(text, hint=ANSWERS_HINT)
    return {name: parse(NodeCpu, _known(one), where=member("", name)) for name, one in data.items()}


def _known(answer: Any) -> Any:
    """A node's answer without keys that are not needed here, and models that are of no use."""
    if not isinstance(answer, dict):
        return answer
    found = {name: one for name, one in answer.items() if name in shape_of(NodeCpu).by_key}
    models = found.get("models")
    if isinstance(models, dict):
        found["models"] = {
            name: {"flags": one["flags"]}
            for name, one in models.items()
            if _MODEL.fullmatch(name) and isinstance(one, dict) and one.get("flags")
        }
    return found


def baseline(nodes: Mapping[str, NodeCpu]) -> Baseline:
    """The processor that all of these nodes have: the model that needs the fewest changes.

    Virtual machines inside of guests are left out: QEMU's own models have no such flags either.

    :raises BaselineError: if their processors have nothing in common that a guest could run on.
    """
    _expect_alike(nodes, "accel", "where a guest of KVM can't run, it can't move to")
    _expect_alike(nodes, "vendor", "no guest moves live between vendors; make a group of each")
    has = {name: frozenset(one.flags) for name, one in nodes.items()}
    common = reduce(frozenset.intersection, has.values())
    nested = frozenset(filter(_NESTED.fullmatch, common))
    wanted = common - nested
    found = min(_candidates(nodes, wanted), default=None)
    if found is None:
        text = f"no processor model of QEMU's is on all of {', '.join(sorted(nodes))}"
        raise BaselineError(text, hint="upgrade the node with the oldest QEMU, or the newest")
    everything = reduce(frozenset.union, has.values())
    changes = [*(f"-{flag}" for flag in found.removed), *(f"+{flag}" for flag in found.added)]
    first = next(iter(nodes.values()))
    lacking = {name: tuple(sorted(everything - flags)) for name, flags in sorted(has.items())}
    return Baseline(
        cpu_type=",".join([found.model, *changes]),
        accel=first.accel,
        vendor=first.vendor,
        model=found.model,
        removed=found.removed,
        added=found.added,
        flags=tuple(sorted(wanted)),
        lacking={name: flags for name, flags in lacking.items() if flags},
        nested=tuple(sorted(nested)),
    )


class _Candidate(NamedTuple):
    """A model and its changes. The smallest is the best one: fewest changes, then fewest removed,
    then the newest of a family."""

    changes: int
    removed_changes: int
    age: tuple[Any, ...]
    model: str
    removed: tuple[str, ...]
    added: tuple[str, ...]


def _candidates(nodes: Mapping[str, NodeCpu], wanted: Collection[str]) -> Iterator[_Candidate]:
    """The models that QEMU has on all nodes, with what makes them have the wanted flags."""
    wanted = frozenset(wanted)
    answers = [one.models for one in nodes.values()]
    for model in set.intersection(*(set(one) for one in answers)):
        flags = [frozenset(one[model].flags) for one in answers]
        all_of_them = reduce(frozenset.union, flags)
        on_each = reduce(frozenset.intersection, flags)
        removed, added = all_of_them - wanted, wanted - on_each
        # A QEMU whose model lacks a flag may not know its name, and refuses to remove it.
        if removed <= on_each:
            parts = tuple(sorted(removed)), tuple(sorted(added))
            changes = len(removed) + len(added)
            yield _Candidate(changes, len(removed), _age(model), model, *parts)


def _age(model: str) -> tuple[Any, ...]:
    """A key that sorts versions of a model, the newest first."""
    parts = _NUMBERS.split(model)
    return tuple(-int(part) if index % 2 else part for index, part in enumerate(parts))


def _expect_alike(nodes: Mapping[str, NodeCpu], what: str, why: str) -> None:
    found: dict[str, list[str]] = {}
    for name, one in sorted(nodes.items()):
        found.setdefault(getattr(one, what), []).append(name)
    if len(found) > 1:
        places = "; ".join(f"{value} on {', '.join(names)}" for value, names in found.items())
        raise BaselineError(f"the nodes differ in {what}: {places}", hint=why)
