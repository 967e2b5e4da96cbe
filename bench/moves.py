"""Moving a guest that runs between two nodes, beside bare QMP and beside `virsh migrate --live`."""

import contextlib
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from bench import libvirt, machine
from bench.harness import Length, Plan, Report, Table, TableRow, in_turns
from bench.movers import (
    ADDRESSES,
    DISK_MIB,
    NAMES,
    UNIT,
    BrineMove,
    Contender,
    RawMove,
    Sample,
    VirshMove,
)
from bench.nodes import Wanted, install, wanted
from lab.debian import host_release
from lab.network import bridge, give_addresses
from lab.node import Node, boot_nodes
from lab.progress import step

DOWNTIME_MORE_MS = 30
"""A move of Brine's has the guest stand still for so much longer than bare QMP at most."""
TOTAL_LIMIT = 1.3
"""The whole of it, beside bare QMP."""
PEER_LIMIT = 1.0
"""Both, beside libvirt's."""
DRAIN_LIMIT = 0.7
"""To move all guests of a node, beside libvirt's in a loop."""

DRAINED, _FEW = 8, 2
JOBS = 4
"""So many guests move at a time, as `brine node drain` has it."""


# ---- two nodes

_CONF = """auth_tcp = "none"
host_uuid = "{uuid}"
"""


@contextlib.contextmanager
def _two_nodes() -> Iterator[dict[str, Node]]:
    """Two nodes on a bridge, with Brine and libvirt."""
    packages = ["brine-instance", "brine-kvmd", "brine-moves"]
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(bridge())
        found = wanted(packages, with_libvirt=True)
        booted = boot_nodes(host_release(), NAMES, network_bridge=network)
        nodes = dict(zip(NAMES, stack.enter_context(booted), strict=True))
        with ThreadPoolExecutor() as pool:
            list(pool.map(partial(_set_up_node, found), nodes.values()))
        key = secrets.token_hex(32)  # of the cluster
        for node in nodes.values():
            node.write("/etc/brine/hmac.key", f"{key}\n", mode=0o600)
        yield nodes


def _set_up_node(found: Wanted, node: Node) -> None:
    install(node, found)
    give_addresses(node, f"{ADDRESSES[node.name]}/24")
    node.shell(f"mkdir -p {UNIT} {libvirt.IMAGES}; mkdir -m 777 {libvirt.SOCKETS}")
    node.run(["brine", "storage", "create", "file", UNIT])
    config = node.read("/etc/libvirt/libvirtd.conf")
    node.write("/etc/libvirt/libvirtd.conf", config + _CONF.format(uuid=uuid.uuid4()))
    node.shell("systemctl stop libvirtd.service; systemctl start libvirtd-tcp.socket")
    node.shell("systemctl start libvirtd.service")


# ---- the rounds and the tables

RAW, RAW_TLS, BRINE, BRINE_TLS = "QMP", "QMP, encrypted", "brine", "brine, encrypted"
VIRSH = "virsh migrate"
_FLOORS = {BRINE: RAW, BRINE_TLS: RAW_TLS}
_KINDS = {False: "no disk", True: f"a disk of {DISK_MIB} MiB, copied"}


def measure(plan: Plan) -> Report:
    """Move guests there and back, in turns."""
    with contextlib.ExitStack() as stack:
        is_ahead = stack.enter_context(machine.group_ahead())
        nodes = stack.enter_context(_two_nodes())
        movers: dict[str, Callable[[], Sample]] = {}
        for number, (copies, kind) in enumerate(_KINDS.items()):
            raw = RawMove(f"raw{number}", nodes, copies=copies)
            brine = BrineMove(f"brine{number}", nodes, copies=copies)
            virsh = VirshMove(f"virsh{number}", nodes, copies=copies)
            stack.callback(raw.close)
            movers[f"{kind}: {RAW}"] = raw.sample
            movers[f"{kind}: {BRINE}"] = brine.sample
            movers[f"{kind}: {VIRSH}"] = virsh.sample
            if plan.length is not Length.TRIAL or copies:
                movers[f"{kind}: {RAW_TLS}"] = partial(raw.sample, is_plain=False)
                movers[f"{kind}: {BRINE_TLS}"] = partial(brine.sample, is_plain=False)
            with step(f"starting guests: {kind}"):
                for one in (raw, brine, virsh):
                    one.start()
        samples = in_turns("moving", plan.rounds, movers)
        with step("starting guests to drain"):
            count = plan.pick(DRAINED, DRAINED, _FEW)
            drains = _drains(nodes, count)
        drained = in_turns("draining", plan.pick(max(plan.rounds // 2, 2), 2, 1), drains)
        ahead = ", ahead of the machine's other work" if is_ahead else ""
        heads = [*machine.description(), _versions(nodes), f"rounds: {plan.rounds}{ahead}"]
    tables = [table for kind in _KINDS.values() for table in _tables(kind, samples)]
    return Report(heads, [*tables, _of_drains(count, drained)], {**samples, **drained})


def _drains(nodes: Mapping[str, Node], count: int) -> dict[str, Callable[[], float]]:
    """Have a node be left by all of so many guests."""
    ours = [BrineMove(f"drain{number}", nodes, copies=False) for number in range(count)]
    theirs = [VirshMove(f"loop{number}", nodes, copies=False) for number in range(count)]
    for one in (*ours, *theirs):
        one.start()
    for one in (*ours, *theirs):
        one.await_boot()
    return {BRINE: partial(_drained, ours, JOBS), VIRSH: partial(_drained, theirs, 1)}


def _drained(guests: Sequence[Contender], jobs: int) -> float:
    """Move guests, so many at a time; returns how long that takes."""
    for one in guests:
        one.prepare()
    began_at = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(Contender.hop, guests))
    return time.perf_counter() - began_at


def _of_drains(count: int, drained: Mapping[str, Sequence[float]]) -> Table:
    virsh = TableRow.of_times(f"{VIRSH}, one after another", drained[VIRSH])
    ours = TableRow.of_times(f"{BRINE}, {JOBS} at a time", drained[BRINE])
    rows = [virsh, ours.beside(virsh, "virsh").at_most(DRAIN_LIMIT)]
    return Table(f"a node is left by all its guests: {count}, without a disk", rows)


def _versions(nodes: Mapping[str, Node]) -> str:
    query = ["dpkg-query", "--show", "--showformat=${Package} ${Version}, ", "--"]
    return nodes[NAMES[0]].run([*query, *libvirt.VERSIONS_OF]).stdout.rstrip(", ")


def _tables(kind: str, samples: Mapping[str, Sequence[Sample]]) -> Iterator[Table]:
    of = {key.partition(": ")[2]: found for key, found in samples.items() if key.startswith(kind)}
    down = {one: TableRow.of_times(one, [each.down_s for each in of[one]]) for one in of}
    ours = [down[BRINE].beside(down[VIRSH], "virsh").at_most(PEER_LIMIT)]
    for one, floor in _FLOORS.items():
        if one in of:
            beside = down[one].beside(down[floor], "QMP")
            ours.append(beside.at_most_above(down[floor], DOWNTIME_MORE_MS))
    told = TableRow.of_times("brine, as its journal says", [one.parts["told"] for one in of[BRINE]])
    theirs = [one for one in (RAW, RAW_TLS, VIRSH) if one in of]
    rows = [*(down[one] for one in theirs), *ours, told]
    yield Table(f"{kind}: how long the guest stands still", rows)
    total = {one: TableRow.of_times(one, [each.total_s for each in of[one]]) for one in of}
    ours = [total[BRINE].beside(total[VIRSH], "virsh").at_most(PEER_LIMIT)]
    for one, floor in _FLOORS.items():
        if one in of:
            ours.append(total[one].beside(total[floor], "QMP").at_most(TOTAL_LIMIT))
    parts = [
        TableRow.of_times(f"  of brine's: {name}", [one.parts[name] for one in of[BRINE]])
        for name in of[BRINE][0].parts
        if name != "told"
    ]
    yield Table(f"{kind}: the whole move", [*(total[one] for one in theirs), *ours, *parts])
