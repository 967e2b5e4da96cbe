"""A node loses its power in the middle of a move: one node has the guest, with all that it was told
is on its disk, and the next move succeeds."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab.network import bridge
from lab.node import Node
from lab.waiting import wait_for
from node.instance_on_node import SMALLEST, info, run_in_guest, wait_ready
from node.moves_on_node import NAME, UNIT, UUID, Nodes, boot_pair

pytestmark = pytest.mark.long

OPERATIONS = Path("/var/lib/brine/operations")
SPEC = Path(f"/var/lib/brine/instances/{NAME}.json")
STATUS = Path(f"/run/brine/moves/{NAME}.json")
SECTORS = 2000
LONG_S = 300.0

_WRITE = f"dd of=/dev/vda bs=512 seek=$((i % {SECTORS})) conv=notrunc,fsync 2>/dev/null"
_WRITES = f"while i=$((i + 1)); do printf %512s $i | {_WRITE}; echo $i >/w && mv /w /written; done"
_BEGIN = (
    "echo {number} >/written; echo '{writes}' >/writer; i={number} sh /writer >/dev/null 2>&1 &"
)


class Moment(NamedTuple):
    """A moment of a move, told by files of a node.

    :param of_source: whether the files are the source's.
    :param is_now: gets the facts of the record of the move, how far its process is, and the spec.
    """

    of_source: bool
    is_now: Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], bool]


def _asked(word: str) -> Callable[..., bool]:
    return lambda record, _status, _spec: record.get("move", {}).get("asked") == word


def _acts(word: str) -> Callable[..., bool]:
    return lambda _record, status, _spec: status.get("act") == word


def _has_claim(record: dict[str, Any], spec: dict[str, Any]) -> bool:
    """Whether the spec has the claim of the move."""
    serial = record.get("move", {}).get("serial")
    return serial is not None and spec.get("claim_serial") == serial


MOMENTS = {
    "prepares": Moment(False, lambda record, _status, _spec: bool(record)),
    "prepared": Moment(False, lambda record, *_: bool(record.get("move", {}).get("is_prepared"))),
    "stops": Moment(True, _asked("stop")),
    "copies": Moment(True, _acts("COPY")),
    "hands over": Moment(True, _asked("hand over")),
    "sent": Moment(True, lambda record, *_: bool(record.get("move", {}).get("has_sent"))),
    "given": Moment(True, lambda record, _status, spec: _has_claim(record, spec)),
    "taken": Moment(False, lambda record, _status, spec: _has_claim(record, spec)),
    "arrived": Moment(False, lambda record, *_: bool(record.get("told", {}).get("arrived"))),
}


def _json(node: Node, file: Path) -> dict[str, Any]:
    try:
        found = json.loads(node.path(file).read_bytes())
    except (OSError, ValueError):  # it is not there, or not any more
        return {}
    return found if isinstance(found, dict) else {}


def _record(node: Node) -> dict[str, Any]:
    """The facts of the record of the node's move."""
    try:
        files = [one for one in node.path(OPERATIONS).iterdir() if one.suffix == ".json"]
    except OSError:
        return {}
    found = [_json(node, OPERATIONS / one.name) for one in files]
    return next((one["facts"] for one in found if "move" in one.get("facts", {})), {})


class PowerLoss:
    """Has a node lose its power at a moment of a move.

    :param seen: the node whose files tell the moment.
    """

    def __init__(self, victim: Node, seen: Node, moment: Moment) -> None:
        self._victim = victim
        self._seen = seen
        self._moment = moment
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self.has_come = False
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PowerLoss:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        if self._error:
            raise self._error

    def _watch(self) -> None:
        seen = self._seen
        while not self._is_over.is_set():
            if self._moment.is_now(_record(seen), _json(seen, STATUS), _json(seen, SPEC)):
                self.has_come = True
                try:
                    self._victim.reset(timeout_s=LONG_S)
                except BaseException as error:
                    self._error = error
                return
            time.sleep(0.001)


@pytest.fixture(scope="module")
def nodes(release: str, packages: list[Path]) -> Iterator[Nodes]:
    with bridge() as network, boot_pair([release, "trixie"], packages, network) as found:
        spec = {
            **SMALLEST,
            "name": NAME,
            "uuid": UUID,
            "node": "n1",
            "claim_serial": 1,
            "disks": [{"name": "data", "size_mib": 16, "unit": UNIT}],
            "nics": [{"mode": "bridged", "link": "br0"}],
            "cpu": "qemu64",
            "admin_state": "up",
        }
        found["n1"].run(["brine", "instance", "define", "-"], stdin=json.dumps(spec))
        found["n1"].run(["brine", "instance", "start", NAME])
        found.may_be_off = True
        yield found


def written(node: Node) -> int:
    return int(run_in_guest(node, NAME, "cat /written"))


def on_disk(node: Node, number: int) -> int:
    """What a sector has that was written with that number; or a later one in its place."""
    sector = f"dd if=/dev/vda bs=512 skip=$(({number} % {SECTORS})) count=1 2>/dev/null"
    return int(run_in_guest(node, NAME, sector).strip("\0 ") or "0")


def holder(nodes: Nodes) -> str:
    """The one node that has the guest, when nothing is pending any more."""

    def settled() -> bool:
        listed = [
            one.run(["brine", *noun, "list", "--json"]).stdout
            for one in nodes.by_name.values()
            for noun in (["move"], ["operations"])
        ]
        return all(json.loads(one) == [] for one in listed)

    try:
        wait_for("nothing to be pending", settled, timeout_s=LONG_S, interval_s=0.5)
    except Exception as error:
        told = [one.run(["brine", "move", "list"]).stdout for one in nodes.by_name.values()]
        raise AssertionError(f"{told}\n{nodes.journals()}") from error
    found = {
        name: json.loads(node.run(["brine", "instance", "list", "--json"]).stdout)
        for name, node in nodes.by_name.items()
    }
    (name,) = [name for name, rows in found.items() if rows]
    for other, node in nodes.by_name.items():
        files = node.run(["find", UNIT, "-name", "*.raw"]).stdout.split()
        assert len(files) == (1 if other == name else 0), files
        running = node.run(["pgrep", "--count", "--full", f"guest={NAME},"], check=False).stdout
        assert int(running) == (1 if other == name else 0), (other, running)
    return name


def begin_writing(node: Node, number: int) -> None:
    run_in_guest(node, NAME, _BEGIN.format(number=number, writes=_WRITES))
    wait_for("writes", lambda: written(node) > number, timeout_s=LONG_S)


def lose_power(nodes: Nodes, victim: str, when: str, *, cold: bool) -> None:
    """Move the guest, where one of the nodes loses its power, and then once more.

    :param victim: ``source`` or ``target``.
    """
    moment, source = MOMENTS[when], holder(nodes)
    number = check(nodes[source], 0)
    target = "n2" if source == "n1" else "n1"
    parts = {"source": nodes[source], "target": nodes[target]}
    seen = parts["source" if moment.of_source else "target"]
    serial = int(info(nodes[source], NAME)["spec"]["claim_serial"]) + 1
    with PowerLoss(parts[victim], seen, moment) as loss:
        record = nodes.move(source, target, serial, cold=cold)
    told = [(one.name, one.answer) for one in record.steps]
    assert loss.has_come, told
    here = holder(nodes)
    number = check(nodes[here], number)
    # Once more, the whole way.
    there = "n2" if here == "n1" else "n1"
    record = nodes.move(here, there, serial + 1, cold=cold)
    told = [(one.name, one.answer) for one in record.steps]
    assert {one.answer["state"] for one in record.steps} == {"done"}, (told, nodes.journals())
    assert holder(nodes) == there
    check(nodes[there], number)


def check(node: Node, number: int) -> int:
    """The guest runs, with a write that it was told is on its disk, and goes on writing; returns
    the number of a later one. If it was started anew it has lost its memory."""
    assert info(node, NAME)["status"] == "running"
    wait_ready(node, NAME)
    if "no" in run_in_guest(node, NAME, "cat /written || echo no"):
        found = on_disk(node, number)
        assert found >= number, "an acknowledged write is lost"
        assert (found - number) % SECTORS == 0
        begin_writing(node, number + SECTORS)
    return written(node)


LIVE = [
    ("target", "prepares"),
    ("target", "prepared"),
    ("source", "copies"),
    ("target", "copies"),
    ("source", "sent"),
    ("target", "sent"),
    ("source", "given"),
    ("target", "given"),
    ("source", "taken"),
    ("target", "taken"),
    ("source", "arrived"),
    ("target", "arrived"),
]
COLD = [("source", "stops"), *LIVE]


@pytest.mark.parametrize(("victim", "when"), LIVE)
def test_a_guest_that_runs(nodes: Nodes, victim: str, when: str) -> None:
    lose_power(nodes, victim, when, cold=False)


@pytest.mark.parametrize(("victim", "when"), [one for one in COLD if one[1] != "sent"])
def test_a_guest_that_is_stopped_for_it(nodes: Nodes, victim: str, when: str) -> None:
    lose_power(nodes, victim, when, cold=True)
