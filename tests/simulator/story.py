"""Histories of a simulated cluster: random ones, and a single move with one fault at a certain
place; with what must be so at the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

from brine.vm.claim import Claim
from lab.move_history import EventKind, faults_of
from simulator.machines import Volume
from simulator.master import SimMaster
from simulator.node import Instance, SimNode
from simulator.world import World

NODES = ("n1", "n2", "n3")
Disturbance = Callable[[float], object]
"""Takes the time after which it is mended, in seconds."""

_LIMIT_S = 2000.0
_REST_S = 30.0


@dataclass(frozen=True)
class Kind:
    """A kind of move.

    :param is_live: the guest runs on during the move.
    :param copies: each node has volumes of its own.
    :param runs: the instance runs, before and after.
    """

    name: str
    is_live: bool
    copies: bool
    runs: bool = True


KINDS = (
    Kind("live with local volumes", is_live=True, copies=True),
    Kind("live with shared files", is_live=True, copies=False),
    Kind("stopped for the move", is_live=False, copies=True),
    Kind("stopped for the move, with shared files", is_live=False, copies=False),
    Kind("off", is_live=False, copies=True, runs=False),
)


class Cluster:
    """A master and three nodes; the instances are on the first.

    :param kinds: of instances, by their names.
    """

    def __init__(self, seed: int, kinds: dict[str, Kind], *, is_calm: bool = False) -> None:
        self.world = World(seed, is_calm=is_calm)
        self.kinds = kinds
        numbers = count(1)
        self.instances = {
            name: Instance(
                name,
                None if kind.copies else Volume(is_shared=True),
                kind.runs,
                partial(next, numbers),
            )
            for name, kind in kinds.items()
        }
        self.nodes = {name: SimNode(self.world, name, self.instances) for name in NODES}
        claims = {name: Claim(NODES[0], 1) for name in kinds}
        self.master = SimMaster(self.world, self.nodes, claims)
        for node in self.nodes.values():
            node.nodes = self.nodes
            node.disk.configuration = dict(claims)
        first = self.nodes[NODES[0]]
        for name, kind in kinds.items():
            first.disk.specs.add(name)
            first.disk.claims[name] = claims[name]
            if kind.copies:
                first.volumes[name] = Volume()
            if kind.runs:
                first.start(name)

    def move(self, instance: str, to: str) -> None:
        self.master.begin(instance, to, cold=not self.kinds[instance].is_live)

    # Faults, each of which is mended after a time.

    def faults(self) -> dict[str, Disturbance]:
        """Faults by their names; each takes the time after which it is mended, in seconds."""
        found: dict[str, Disturbance] = {"kill master": self._kill_master}
        for node in self.nodes.values():
            found[f"kill process of {node.name}"] = partial(self._kill, node)
            found[f"power of {node.name}"] = partial(self._power, node)
            for name in self.instances:
                found[f"kill QEMU of {name} on {node.name}"] = partial(_kill_qemu, node, name)
        ends = ("master", *NODES)
        for link in (frozenset((one, two)) for one in ends for two in ends if one < two):
            found[f"cut {'-'.join(sorted(link))}"] = partial(self._cut, link)
        return found

    def disturbances(self) -> dict[str, Disturbance]:
        """Faults, and what users do."""
        found = self.faults()
        for name, kind in self.kinds.items():
            found[f"abort {name}"] = partial(_abort, self.master, name)
            for node in self.nodes.values() if kind.runs else ():
                found[f"start {name} on {node.name}"] = partial(_start, node, name)
        return found

    def _kill_master(self, mended_s: float) -> None:
        self.master.kill()
        self.world.later(mended_s, self.master.start)

    def _kill(self, node: SimNode, mended_s: float) -> None:
        node.kill_process()
        self.world.later(mended_s, node.start_process)

    def _power(self, node: SimNode, mended_s: float) -> None:
        node.lose_power()
        self.world.later(mended_s, node.boot)

    def _cut(self, link: frozenset[str], mended_s: float) -> None:
        self.world.cut.add(link)
        self.world.later(mended_s, self.world.cut.discard, link)

    # The end.

    def finish(self) -> list[str]:
        """Let all operations end, and say what is wrong then."""
        self.world.run(_LIMIT_S, lambda: not self.master.records)
        self.world.run(self.world.now + _REST_S)
        for name, instance in self.instances.items():
            node = self.nodes[self.master.configuration[name].node]
            volume = instance.volume or node.volumes.get(name)
            for number in volume.cached if volume else ():
                self.world.tell(EventKind.FOUND, name, node.name, str(number))
        return [*faults_of(self.world.history), *self._left()]

    def _left(self) -> Iterator[str]:
        """What is left of moves, and instances that are not where the configuration has them."""
        if any(self.master.locks.claims()):
            yield "the table of locks has claims"
        for name, instance in self.instances.items():
            home = self.master.configuration[name].node
            for node in self.nodes.values():
                is_home = node.name == home
                if (node.qemu(name) is not None) != (is_home and instance.runs):
                    yield f"{name} is at home on {home}, and {node.name} has {node.qemu(name)}"
                if (name in node.disk.specs) != is_home or node.may_run(name) != is_home:
                    yield f"{name} is at home on {home}, and not by the claim on {node.name}"
                if not instance.volume and (name in node.volumes) != is_home:
                    yield f"{name} is at home on {home}, and its volume on {node.name} differs"
        for node in self.nodes.values():
            if node.disk.sources or node.disk.targets:
                yield f"{node.name} has records: {node.disk.sources} {node.disk.targets}"


def _kill_qemu(node: SimNode, instance: str, _: float) -> None:
    node.kill_qemu(instance)


def _start(node: SimNode, instance: str, _: float) -> None:
    node.start(instance)


def _abort(master: SimMaster, instance: str, _: float) -> None:
    master.abort(instance)


def random_history(seed: int) -> list[str]:
    """Moves, edits, starts by hand, aborts, kills and cuts at random; returns what is wrong."""
    kinds = {name: random.Random(f"{seed}{name}").choice(KINDS) for name in ("web1", "db1")}
    cluster = Cluster(seed, kinds)
    world = cluster.world
    chance = world.random
    moments = [0.0]
    for name in kinds:
        for _ in range(chance.randint(1, 4)):
            moments.append(world.between(0, 60))
            world.later(moments[-1], cluster.move, name, chance.choice(NODES))
        for _ in range(chance.randint(0, 3)):
            world.later(world.between(0, 90), cluster.master.edit, name)
        if chance.random() < 0.3:
            world.later(chance.choice(moments) + world.between(0, 10), cluster.master.abort, name)
    disturb = list(cluster.disturbances().values())
    for _ in range(chance.choice((0, 1, 3, 6, 12))):
        at = chance.choice(moments) + world.between(0, 12)
        world.later(at, chance.choice(disturb), world.between(0.5, 20))
    # Some of them hit a place, however short it is.
    hit = {chance.randint(0, 150): chance.choice(disturb) for _ in range(chance.randint(0, 6))}
    numbers = count()

    def on_event(_: str) -> None:
        if disturbance := hit.get(next(numbers)):
            disturbance(world.between(0.2, 20))

    world.on_event = on_event
    world.run(90)
    return cluster.finish()


def events_of(kind: Kind) -> list[str]:
    """The events of one move that nothing disturbs."""
    cluster = Cluster(0, {"web1": kind}, is_calm=True)
    events: list[str] = []
    cluster.world.on_event = events.append
    cluster.world.later(1.0, cluster.move, "web1", "n2")
    wrong = cluster.finish()
    assert not wrong, wrong
    assert cluster.master.configuration["web1"].node == "n2"
    return events


def with_fault(kind: Kind, number: int, fault: str, mended_s: float) -> list[str]:
    """One move, with a disturbance before its n-th event; returns what is wrong."""
    cluster = Cluster(0, {"web1": kind}, is_calm=True)
    left = number

    def on_event(_: str) -> None:
        nonlocal left
        if left == 0:
            cluster.disturbances()[fault](mended_s)
        left -= 1

    cluster.world.on_event = on_event
    cluster.world.later(1.0, cluster.move, "web1", "n2")
    cluster.world.run(60)
    return cluster.finish()
