"""Which instance goes to which node when nodes are emptied, or filled again. Pure: what the nodes
answer, and the configuration, are the input.

A node that is drained takes nothing new: that is ``drained`` in the configuration, as Ganeti has
it. The instances that a drain moves away are recorded as tags of their node, ``brine:home:`` and
the UUID, before the first of them moves. So the record is in the configuration that all master
candidates have, and *fill* knows what to bring home, whatever becomes of the master meanwhile. A
drained node is no master candidate; another tag says that it was one. A record ends with what it
has at home again, or moved for itself. Whoever undrains a node leaves the rest where it is: a tag
says so, and the next drain begins a record of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from brine.cluster.moves import Move
from brine.common.errors import BrineError
from brine.config.model import Configuration, Node
from brine.config.schema import ConfigError

HOME_TAG = "brine:home:"
CANDIDATE_TAG = "brine:was-candidate"
UNDRAINED_TAG = "brine:undrained"
DEFAULT_JOBS = 4
"""How many instances move at a time."""

_OWN_MIB = 64
"""What QEMU needs beside the memory of its guest, at least."""
_OWN_SHARE = 50
"""And the part of the guest's memory that it needs for page tables and the like: one of so many."""
_MIB = 1 << 20


class PlacementError(BrineError):
    """Nodes that can't be emptied or filled as asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """An instance that moves.

    :param node: the name of the node that it is on.
    :param units: by name, how many MiB of its disks each storage unit has. A disk in none is at
        the same path on both nodes, or keeps the instance from moving, which its node tells.
    :param runs: whether it needs memory.
    """

    name: str
    uuid: str
    node: str
    memory_mib: int
    units: Mapping[str, int] = dataclasses.field(default_factory=dict)
    runs: bool = True

    def needed_mib(self) -> int:
        """The memory that it takes of a node."""
        return self.memory_mib + self.memory_mib // _OWN_SHARE + _OWN_MIB if self.runs else 0

    @classmethod
    def of_row(cls, row: Any, node: str) -> Tenant:
        """It by a row of ``brine instance list --json`` of a node.

        :raises PlacementError: if that is none.
        """
        try:
            units: dict[str, int] = {}
            for volume in row["volumes"]:
                if name := str(volume["unit"] or ""):
                    units[name] = units.get(name, 0) + -(-int(volume["made"] or 0) // _MIB)
            return cls(
                name=str(row["name"]),
                uuid=str(row["uuid"]),
                node=node,
                memory_mib=int(row["memory_mib"]),
                units=units,
                runs=row["oper_state"] in ("running", "starting", "stopping"),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise PlacementError(f"{node}: no row of an instance: {error!r:.200}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A node that instances may go to.

    :param units: by name, the MiB that are free in each that takes volumes.
    :param why_not: why it takes none; empty if it takes some.
    """

    node: str
    memory_mib: int = 0
    units: Mapping[str, int] = dataclasses.field(default_factory=dict)
    why_not: str = ""

    @classmethod
    def of_facts(cls, node: str, facts: Any, rows: Any = None) -> Room:
        """It by the output of ``brine node facts --json``; without that it takes nothing.

        :param rows: the output of ``brine instance list --json`` there, if it is known: memory that
            its guests have not touched yet is available, and theirs all the same.
        """
        try:
            units = {
                str(name): int(one["free_mib"])
                for name, one in facts["units"].items()
                if one["allocatable"]
            }
            memory_mib = int(facts["memory_available_mib"])
            if isinstance(rows, list) and "memory_mib" in facts:
                taken = sum(Tenant.of_row(row, node).needed_mib() for row in rows)
                memory_mib = max(0, min(memory_mib, int(facts["memory_mib"]) - taken))
            return cls(node=node, memory_mib=memory_mib, units=units)
        except PlacementError as error:
            return cls(node=node, why_not=str(error))
        except (LookupError, TypeError, ValueError, AttributeError):
            said = facts if isinstance(facts, str) and facts else "it has not answered"
            return cls(node=node, why_not=f"its facts are not known: {said:.200}")


class PlannedMove(NamedTuple):
    """An instance that goes from one node to another.

    :param wave: the moves of one wave go at the same time; the first has number 0.
    """

    instance: str
    uuid: str
    source: str
    target: str
    memory_mib: int
    wave: int


class Staying(NamedTuple):
    """An instance that stays where it is.

    :param is_fault: false if it is no matter of the plan, as it does not run.
    """

    instance: str
    node: str
    why: str
    is_fault: bool = True


class Plan(NamedTuple):
    """The moves, in their order, and what stays.

    :param left: by node, the MiB of memory that stay free after all moves.
    """

    moves: tuple[PlannedMove, ...] = ()
    stays: tuple[Staying, ...] = ()
    left: Mapping[str, int] = {}

    def is_whole(self) -> bool:
        """Whether all that should move has a place."""
        return not any(one.is_fault for one in self.stays)

    def to_json(self) -> dict[str, Any]:
        return {
            "moves": [one._asdict() for one in self.moves],
            "stays": [one._asdict() for one in self.stays],
            "left": dict(self.left),
            "is_whole": self.is_whole(),
        }


Barred = Mapping[str, Mapping[str, str]]
"""By instance and node, why the instance can't go to that node; the node ``*`` is any."""


def plan(
    guests: Collection[Tenant],
    places: Collection[Room],
    *,
    jobs: int = DEFAULT_JOBS,
    barred: Barred | None = None,
) -> Plan:
    """A place for each guest: the largest first, each on the node that keeps most memory free. If
    some have no place then, each goes where it leaves least: that packs more.

    :param jobs: how many move at a time.
    :param barred: what is known to be impossible, such as for another processor.
    """
    spread, packed = (_fitted(guests, places, jobs, barred or {}, order) for order in (-1, 1))
    return packed if _lost(packed) < _lost(spread) else spread


def _lost(one: Plan) -> int:
    return sum(stay.is_fault for stay in one.stays)


def _fitted(
    guests: Collection[Tenant], places: Collection[Room], jobs: int, barred: Barred, order: int
) -> Plan:
    memory = {one.node: one.memory_mib for one in places}
    units = {one.node: dict(one.units) for one in places}
    found: list[tuple[Tenant, str]] = []
    stays: list[Staying] = []
    for guest in sorted(guests, key=lambda one: (-one.needed_mib(), one.name)):
        reasons: dict[str, str] = {}
        for place in places:
            room = dataclasses.replace(
                place, memory_mib=memory[place.node], units=units[place.node]
            )
            reasons[place.node] = _why_not(guest, room, barred.get(guest.name, {}))
        fit = [node for node, why in reasons.items() if not why]
        if not fit:
            stays.append(Staying(guest.name, guest.node, _all_of(reasons)))
            continue
        target = min(fit, key=lambda node: (order * memory[node], node))
        memory[target] -= guest.needed_mib()
        for name, size_mib in guest.units.items():
            if name in units[target]:
                units[target][name] -= size_mib
        found.append((guest, target))
    moves = tuple(
        PlannedMove(guest.name, guest.uuid, guest.node, target, guest.needed_mib(), number // jobs)
        for number, (guest, target) in enumerate(found)
    )
    return Plan(moves, tuple(stays), memory)


def _why_not(guest: Tenant, room: Room, barred: Mapping[str, str]) -> str:
    """Why a guest has no place on a node; empty if it has one."""
    if room.node == guest.node:
        return "it is there"
    if why := room.why_not or barred.get(room.node) or barred.get("*", ""):
        return why
    if guest.needed_mib() > room.memory_mib:
        return f"{room.memory_mib} MiB of memory are left, and {guest.needed_mib()} are needed"
    for name, size_mib in guest.units.items():
        if name not in room.units:
            return f"it has no storage unit {name}"
        if size_mib > room.units[name]:
            return f"{name} has {room.units[name]} MiB left, and {size_mib} are needed"
    return ""


def _all_of(reasons: Mapping[str, str]) -> str:
    """Why none of several nodes is the place."""
    known = {node: why for node, why in reasons.items() if why != "it is there"}
    if len({*known.values()}) == 1 and len(known) > 1:
        return f"{', '.join(known)}: {next(iter(known.values()))}"
    return "; ".join(f"{node}: {why}" for node, why in known.items()) or "there is no other node"


# What the nodes of the configuration may take.


def fault_of_target(node: Node) -> str:
    """Why a node takes no instance; empty if it takes some."""
    if node.offline:
        return "it is offline"
    if node.drained:
        return "it is drained"
    return "" if node.vm_capable else "it runs no instances (vm_capable is false)"


def places_of(
    configuration: Configuration,
    facts: Mapping[str, Any],
    rows: Mapping[str, Any],
    *,
    to: str = "",
    but: Iterable[str] = (),
) -> list[Room]:
    """The nodes that instances may go to.

    :param facts: by name, what ``brine node facts --json`` has printed there, or why it has not.
    :param rows: likewise of ``brine instance list --json``.
    :param to: the one that all go to; empty for any.
    :param but: names of nodes that are none.
    :raises PlacementError: if *to* is none of them.
    """
    left_out = {*but}
    wanted = configuration.node(to).name if to else ""
    found = []
    for node in sorted(configuration.nodes.values(), key=lambda one: one.name):
        if node.name in left_out or wanted not in ("", node.name):
            continue
        why_not = fault_of_target(node)
        if why_not and wanted:
            raise PlacementError(f"{node.name} takes no instances: {why_not}")
        if not why_not:
            name = node.name
            found.append(Room.of_facts(name, facts.get(name), rows.get(name)))
    if wanted and not found:
        raise PlacementError(f"{wanted} is the node that its instances are to leave")
    return found


# Draining.


class Emptied(NamedTuple):
    """The guests of nodes that are to be emptied, and what is no matter of it."""

    guests: list[Tenant]
    stays: list[Staying]


def guests_on(configuration: Configuration, rows: Mapping[str, Any]) -> Emptied:
    """The instances that run on nodes.

    :param rows: by the node's name, what ``brine instance list --json`` has printed there.
    :raises PlacementError: if a node has not answered.
    """
    guests, stays = [], []
    for node, listed in rows.items():
        if not isinstance(listed, list):
            raise PlacementError(f"{node}: its instances are not known: {listed!s:.200}")
        for guest in (Tenant.of_row(row, node) for row in listed):
            known = configuration.instances.get(guest.uuid)
            at = configuration.nodes.get(known.primary_node) if known else None
            if not guest.runs:
                stays.append(Staying(guest.name, node, "it does not run", is_fault=False))
            elif known is None:
                stays.append(Staying(guest.name, node, "the configuration has no such instance"))
            elif at is None or at.name != node:
                name = at.name if at else "no node"
                stays.append(Staying(guest.name, node, f"in the configuration it is on {name}"))
            else:
                guests.append(guest)
    return Emptied(guests, stays)


def drain_plan(
    configuration: Configuration,
    rows: Mapping[str, Any],
    facts: Mapping[str, Any],
    *,
    others: Mapping[str, Any] | None = None,
    to: str = "",
    jobs: int = DEFAULT_JOBS,
    barred: Barred | None = None,
) -> Plan:
    """How nodes are emptied: all that runs there gets a place elsewhere.

    :param rows: by the name of each of these nodes, its output of ``brine instance list --json``.
    :param facts: by the names of other nodes, theirs of ``brine node facts --json``; *others* has
        their instances, where these are known.
    :raises PlacementError: if one of them has not answered, or *to* takes no instances.
    """
    found = guests_on(configuration, rows)
    places = places_of(configuration, facts, others or {}, to=to, but=rows)
    made = plan(found.guests, places, jobs=jobs, barred=barred)
    return made._replace(stays=(*made.stays, *found.stays))


def begun_moves(
    configuration: Configuration, nodes: Collection[str], moves: Collection[Move], *, fills: bool
) -> list[Move]:
    """Those of the pending moves that go on before nodes are emptied or filled. The nodes' lists
    may lack their guests: a guest may have left its source, and not run on its target yet.

    :param nodes: their names.
    :param fills: the nodes are filled: the moves of all that is at home there; else, those from and
        to these nodes.
    """
    if fills:
        uuids = {uuid for node in nodes for uuid in at_home(configuration, node)}
        return [one for one in moves if one.uuid in uuids]
    return [one for one in moves if {one.source, one.target} & {*nodes}]


def with_drained(configuration: Configuration, node: str, uuids: Iterable[str]) -> Configuration:
    """The configuration in which a node is drained, and has a record of what was there.

    The master is not marked, as Ganeti has it, so that it stays the master. The record of a former
    drain goes if the node was undrained since. What a fill has failed to bring home stays on it.

    :param uuids: of the instances that leave it. One that a drain has moved here from another node
        has its home there still.
    """
    old = configuration.node(node)
    of_others = {
        tag for one in configuration.nodes.values() if one.uuid != old.uuid for tag in one.tags
    }
    is_master = configuration.cluster.master_node == old.uuid
    is_over = UNDRAINED_TAG in old.tags
    kept = [one for one in old.tags if not (is_over and _is_record(one))]
    kept += [tag for one in uuids if (tag := f"{HOME_TAG}{one}") not in of_others]
    if old.master_candidate and not is_master:
        kept.append(CANDIDATE_TAG)
    new = dataclasses.replace(
        old,
        drained=old.drained or not is_master,
        master_candidate=is_master,
        tags=[*dict.fromkeys(kept)],
    )
    return _with_node(configuration, new)


def _is_record(tag: str) -> bool:
    """Whether a tag is of the record of a drain that a next one begins anew."""
    return tag == UNDRAINED_TAG or tag.startswith(HOME_TAG)


# Filling.


def at_home(configuration: Configuration, node: str) -> list[str]:
    """The UUIDs of the instances that a drain has recorded as those of a node."""
    tags = configuration.node(node).tags
    return [one.removeprefix(HOME_TAG) for one in tags if one.startswith(HOME_TAG)]


def fill_plan(
    configuration: Configuration,
    nodes: Collection[str],
    rows: Mapping[str, Any],
    facts: Mapping[str, Any],
    *,
    jobs: int = DEFAULT_JOBS,
    barred: Barred | None = None,
) -> Plan:
    """How the instances that drains have moved away come home, each to its own node.

    :param nodes: the names of those that are filled.
    :param rows: by the names of nodes, their output of ``brine instance list --json``.
    :param facts: by the names of these nodes, theirs of ``brine node facts --json``.
    :raises PlacementError: if one of these has not answered.
    """
    moves: list[PlannedMove] = []
    stays: list[Staying] = []
    left: dict[str, int] = {}
    for node in nodes:
        guests, missing = _away_from(configuration, node, rows)
        home = configuration.node(node).name
        place = Room.of_facts(home, facts.get(home), rows.get(home))
        if place.why_not:
            raise PlacementError(f"{home} can't be filled: {place.why_not}")
        made = plan(guests, [place], jobs=jobs, barred=barred)
        moves += made.moves
        stays += [*made.stays, *missing]
        left |= made.left
    return Plan(tuple(moves), tuple(stays), left)


def _away_from(configuration: Configuration, node: str, rows: Mapping[str, Any]) -> Emptied:
    """The instances that a drain has moved away from a node, and that are still away."""
    guests, stays = [], []
    home = configuration.node(node)
    for uuid in at_home(configuration, node):
        known = configuration.instances.get(uuid)
        if known is None or known.primary_node == home.uuid:
            continue
        at = configuration.nodes[known.primary_node].name
        listed = rows.get(at)
        if not isinstance(listed, list):
            why = f"its instances are not known: {listed or 'it has not answered'!s:.200}"
            stays.append(Staying(known.name, at, why))
            continue
        found = [one for row in listed if (one := Tenant.of_row(row, at)).uuid == uuid]
        guests += found
        if not found:
            stays.append(Staying(known.name, at, "the node has no such instance"))
    return Emptied(guests, stays)


def without_mark(configuration: Configuration, node: str) -> Configuration:
    """The configuration in which a node is to be filled: it takes instances again, and is the
    candidate that it was. What a drain has moved away stays recorded until it is at home."""
    old = configuration.node(node)
    new = dataclasses.replace(
        old,
        drained=False,
        master_candidate=old.master_candidate or CANDIDATE_TAG in old.tags,
        tags=[one for one in old.tags if one not in (CANDIDATE_TAG, UNDRAINED_TAG)],
    )
    return _with_node(configuration, new)


def with_undrained(configuration: Configuration, node: str) -> Configuration:
    """The configuration in which a node takes instances again, and what a drain has moved away may
    stay where it is: a fill brings it home, but another drain forgets it."""
    filled = without_mark(configuration, node)
    old = filled.node(node)
    tags = [*old.tags, *([UNDRAINED_TAG] if at_home(filled, node) else [])]
    return _with_node(filled, dataclasses.replace(old, tags=tags))


def with_home(
    configuration: Configuration, node: str, moving: Collection[str] = ()
) -> Configuration:
    """The configuration whose record of a node has only those that are not at home yet.

    :param moving: the UUIDs of instances with a pending move, which may be away by its end.
    """
    old = configuration.node(node)
    tags = [*_away(configuration, old, moving)]
    return _with_node(configuration, dataclasses.replace(old, tags=tags))


def without_home(configuration: Configuration, uuid: str) -> Configuration:
    """The configuration in which no node is recorded as the home of an instance: it was moved for
    itself, and stays where it is."""
    tag = f"{HOME_TAG}{uuid}"
    for old in [one for one in configuration.nodes.values() if tag in one.tags]:
        left = [one for one in old.tags if one != tag]
        if not any(one.startswith(HOME_TAG) for one in left):
            left = [one for one in left if one != UNDRAINED_TAG]
        configuration = _with_node(configuration, dataclasses.replace(old, tags=left))
    return configuration


def _away(configuration: Configuration, node: Node, moving: Collection[str]) -> Iterator[str]:
    for tag in node.tags:
        uuid = tag.removeprefix(HOME_TAG)
        known = configuration.instances.get(uuid)
        is_away = known is not None and (known.primary_node != node.uuid or uuid in moving)
        if not tag.startswith(HOME_TAG) or is_away:
            yield tag


def _with_node(configuration: Configuration, node: Node) -> Configuration:
    nodes = configuration.nodes | {node.uuid: node}
    return dataclasses.replace(configuration, nodes=nodes)


def expect_members(configuration: Configuration, names: Iterable[str]) -> list[str]:
    """The whole names of nodes.

    :raises ConfigError: if one is none.
    """
    found = [configuration.node(name).name for name in names]
    if not found:
        raise ConfigError("no node is named")
    return [*dict.fromkeys(found)]
