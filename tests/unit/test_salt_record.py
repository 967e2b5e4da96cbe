"""The runner of Salt's side: what outboxes tell, and what there is in the whole cluster."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unit.salt_loader import be_on, load

NODES = ("node1.example.com", "node2.example.com", "node3.example.com")
WEB1 = {"name": "web1.example.com", "uuid": "u1", "status": "running", "admin_state": "up"}
# The master's brine: it shows the nodes, and records events into a file. It refuses an outbox with
# a number that is none, or with an event "stop", and events that begin with "bad".
BRINE = """\
#!{python} -SE
import json, os, sys
place = {place!r}
nodes = json.load(open(place + "/nodes"))
match sys.argv[1:]:
    case ["config", "show", "/nodes"]:
        found = nodes
    case ["config", "show", "/cluster/master_node"]:
        found = {master!r}
    case ["config", "show", pointer] if pointer == "/nodes/{master}/name":
        found = {master!r}
    case ["config", "this-node", "--json"]:
        found = {{"is_master": os.path.exists(place + "/was-master")}}
    case ["config", "show", "/instances"]:
        found = {{"u1": {{}}}}
    case ["config", "show", "/cluster/serial_no"]:
        found = 7
    case ["config", "record", "--node", node, "-", "--json"]:
        text = sys.stdin.read()
        ids = [one["id"] for one in json.loads(text)]
        if "NaN" in text or "stop" in ids:
            sys.exit("brine: error: -: is no JSON\\nbrine: hint: none")
        with open(place + "/recorded", "a") as file:
            print(json.dumps([node, ids]), file=file)
        given = {{"changed": True, "reason": "why"}}
        found = {{"events": [{{"id": one, "recorded": one[:3] != "bad", **given}} for one in ids]}}
print(json.dumps(found))
"""


class Minions:
    """The minions of three nodes, of which node1 is the master's host.

    :ivar outboxes: the ids of the events of each node, or whole events.
    :ivar others: minions that are no nodes.
    :ivar failing: those whose states fail.
    :ivar instances: what each node says of its instances.
    :ivar told_when_applied: what the outbox of each node had when it last applied states.
    :ivar applying: what nodes say when they are to apply states, if that is something else.
    :ivar at_work: what happens while an outbox is looked at; once.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.outboxes: dict[str, Any] = {name: [] for name in NODES}
        self.silent: set[str] = set()
        self.failing: set[str] = set()
        self.others: list[str] = []
        self.instances: dict[str, Any] = {NODES[0]: [], NODES[1]: [WEB1], NODES[2]: []}
        self.parts = ["config", "instance"]
        self.applying: dict[str, Any] = {}
        self.serials = {NODES[0]: 7}
        self.applied: list[str] = []
        self.told_when_applied: dict[str, Any] = {}
        self.states: set[str] = set()
        self.at_work: Any = None

    @property
    def recorded(self) -> list[tuple[str, list[str]]]:
        """The changes that the configuration was told, in order."""
        file = self.place / "recorded"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(node, ids) for node, ids in map(json.loads, lines)]

    def execute(  # as Salt's runner salt.execute
        self,
        tgt: str,
        fun: str,
        arg: Any = (),
        timeout: int | None = None,
        tgt_type: str = "glob",
        kwarg: Any = None,
    ) -> dict[str, Any]:
        assert tgt_type == "pcre"
        known = [one for one in (*NODES, *self.others) if re.match(tgt, one)]
        ids = [each for each in known if each not in self.silent]
        return {each: self._call(each, fun, *arg, **(kwarg or {})) for each in ids}

    def _call(self, minion: str, function: str, *arguments: str, **given: Any) -> Any:
        if function == "brine.health":
            serial = self.serials.get(minion)
            return {
                "grains": {"version": "0.2.0", "parts": self.parts},
                "instances": as_asked(self._call(minion, "brine.list")),
                "outbox": as_asked(self._call(minion, "brine.outbox_list")),
                "serial": {"said": serial} if serial else {"refused": "no configuration"},
            }
        if function == "brine.outbox_list":
            events = self.outboxes[minion]
            if self.at_work:
                work, self.at_work = self.at_work, None
                work()
            if not isinstance(events, list):
                return events
            return [one if isinstance(one, dict) else {"id": one} for one in events]
        if function == "brine.outbox_acknowledge":
            self.outboxes[minion] = [one for one in self.outboxes[minion] if one not in arguments]
            return []
        if function == "brine.list":
            return self.instances[minion]
        assert function == "state.apply"
        self.states.update(arguments)
        self.applied.append(minion)
        self.told_when_applied[minion] = list(self.outboxes[minion])
        if minion in self.applying:
            return self.applying[minion]
        told = {"name": "a", "result": minion not in self.failing, "comment": "a\nforged"}
        return {"a": {**told, "changes": {}, "__run_num__": 0}}


def as_asked(answer: Any) -> dict[str, Any]:
    """An answer as ``brine.ask`` has it: a text is the reason for none."""
    return {"refused": answer} if isinstance(answer, str) else {"said": answer}


@pytest.fixture
def minions(tmp_path: Path) -> Minions:
    return Minions(tmp_path)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minions: Minions) -> ModuleType:
    """The runner, on a master whose configuration has three nodes, the first two candidates."""
    give_nodes(tmp_path, NODES)
    command = tmp_path / "bin/brine"
    command.parent.mkdir()
    names = {"python": sys.executable, "place": str(tmp_path), "master": NODES[0]}
    command.write_text(BRINE.format_map(names))
    command.chmod(0o755)
    be_on("node1", monkeypatch)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    given = {"__opts__": {"cachedir": str(tmp_path)}, "__context__": {}}
    return load("runners", "brine", __salt__={"salt.execute": minions.execute}, **given)


def give_nodes(tmp_path: Path, names: Iterable[str]) -> None:
    """Have the configuration have these nodes."""
    nodes = {name: {"name": name, "master_candidate": name != NODES[2]} for name in names}
    (tmp_path / "nodes").write_text(json.dumps(nodes))


def test_an_outbox_is_recorded_redistributed_and_acknowledged(
    runner: ModuleType, minions: Minions
) -> None:
    minions.outboxes[NODES[2]] = ["a", "b"]
    told = runner.record(NODES[2])
    assert told == {
        "result": True,
        "comment": "2 events are recorded",
        "nodes": {NODES[2]: {"recorded": 2, "refused": []}},
    }
    assert minions.recorded == [(NODES[2], ["a", "b"])]
    # It forgets them when it has the configuration that knows of them.
    assert minions.told_when_applied[NODES[2]] == ["a", "b"]
    assert minions.outboxes[NODES[2]] == []
    assert sorted(minions.applied) == sorted(NODES)
    # The rest of what pillar says is not applied on this occasion.
    assert minions.states == {"brine.confd"}
    minions.applied.clear()
    # Of a candidate, only candidates hear.
    minions.outboxes[NODES[1]] = ["c"]
    runner.record("node2")
    assert sorted(minions.applied) == sorted(NODES[:2])


def test_an_empty_outbox_changes_nothing(runner: ModuleType, minions: Minions) -> None:
    assert runner.record()["nodes"] == {key: {"recorded": 0, "refused": []} for key in NODES}
    assert (minions.recorded, minions.applied) == ([], [])


def test_what_is_refused_stays_and_stops_no_other(runner: ModuleType, minions: Minions) -> None:
    minions.outboxes = {NODES[0]: {"a": 1}, NODES[1]: ["bad1", "c"], NODES[2]: "it failed"}
    told = runner.record()["nodes"]
    assert told[NODES[1]] == {"recorded": 1, "refused": ["bad1: why"]}
    assert told[NODES[2]]["refused"] == ["its outbox is not known: it failed"]
    assert minions.outboxes[NODES[1]] == ["bad1"]
    assert minions.recorded == [(NODES[1], ["bad1", "c"])]


@pytest.mark.parametrize("minion", ["node9", "*", "..", "", "node1.example.com|node2", "x\n\x1b"])
def test_a_stranger_is_refused(
    runner: ModuleType, minions: Minions, caplog: pytest.LogCaptureFixture, minion: str
) -> None:
    told = runner.record(minion)
    assert (told["result"], minions.recorded) == (False, [])
    shown = minion.replace("\n", "\\n").replace("\x1b", "\\x1b")
    assert told["comment"] == f"{shown} is no node of the cluster"
    assert caplog.messages == [f"brine.record: {shown} is no node of the cluster"]


def test_what_a_minion_says_forges_no_line_of_the_log(
    runner: ModuleType, minions: Minions, caplog: pytest.LogCaptureFixture
) -> None:
    minions.outboxes[NODES[1]] = "it failed\n[ERROR] forged \x1b[2J" + "x" * 1000
    runner.record(NODES[1])
    (message,) = caplog.messages
    assert message.startswith(
        r"brine.record: node2.example.com: its outbox is not known: it failed\n[ERROR] forged \x1b["
    )
    assert len(message) < 500


@pytest.mark.parametrize("host", ["node2", "salt.example.com"])
def test_a_host_with_a_copy_of_the_configuration_records_nothing(
    runner: ModuleType, minions: Minions, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    minions.outboxes[NODES[1]] = ["a"]
    be_on(host, monkeypatch)
    told = runner.record(NODES[1])
    text = f"the cluster's master, node1.example.com, writes the configuration; this is {host}"
    assert (told["result"], told["comment"]) == (False, text)
    assert (minions.recorded, minions.outboxes[NODES[1]]) == ([], ["a"])
    # The next call takes up what this one has left.
    be_on("node1", monkeypatch)
    assert runner.record(NODES[2])["nodes"][NODES[1]]["recorded"] == 1


def test_a_master_with_another_name_is_still_the_master(
    runner: ModuleType, minions: Minions, monkeypatch: pytest.MonkeyPatch
) -> None:
    minions.outboxes[NODES[1]] = ["a"]
    be_on("alpha.example.com", monkeypatch)
    (minions.place / "was-master").touch()
    assert runner.record(NODES[1])["nodes"][NODES[1]]["recorded"] == 1


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"id": "a", "time": math.nan}, "-: is no JSON"),
        ({"id": b"a"}, "its outbox is no JSON: "),
        ({"id": "stop"}, "-: is no JSON"),
    ],
)
def test_an_outbox_that_is_refused_as_a_whole_stops_no_other(
    runner: ModuleType, minions: Minions, event: dict[str, Any], reason: str
) -> None:
    minions.outboxes.update({NODES[0]: [event], NODES[1]: ["b"]})
    told = runner.record()["nodes"]
    assert told[NODES[0]]["recorded"] == 0
    assert told[NODES[0]]["refused"][0].startswith(reason)
    assert told[NODES[1]] == {"recorded": 1, "refused": []}
    assert minions.outboxes[NODES[0]] == [event]
    assert runner.record(NODES[2])["nodes"].keys() == {NODES[2]}


def test_a_node_that_is_removed_while_it_waits_is_dropped(
    runner: ModuleType, minions: Minions, tmp_path: Path
) -> None:
    minions.outboxes.update({NODES[1]: ["a"], NODES[2]: ["b"]})
    minions.at_work = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        runner.record(NODES[2])
    give_nodes(tmp_path, NODES[:2])
    assert runner.record(NODES[1])["nodes"].keys() == {NODES[1]}
    assert minions.recorded == [(NODES[1], ["a"])]


@pytest.mark.parametrize(
    ("kind", "reason"), [("silent", "it has not answered"), ("failing", "a: a; forged")]
)
def test_a_candidate_that_has_not_got_the_configuration_gets_it_in_a_later_call(
    runner: ModuleType,
    minions: Minions,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    reason: str,
) -> None:
    minions.outboxes[NODES[2]] = ["a"]
    setattr(minions, kind, {NODES[1]})
    told = runner.record(NODES[2])
    assert (told["result"], told["not_redistributed"]) == (False, {NODES[1]: reason})
    assert told["nodes"] == {NODES[2]: {"recorded": 1, "refused": []}}
    (message,) = caplog.messages
    assert message.startswith("brine.record: node2.example.com is not as the configuration says: ")
    assert "\n" not in message
    minions.applied.clear()
    assert runner.record(NODES[0])["result"] is False
    setattr(minions, kind, set())
    minions.applied.clear()
    assert runner.record(NODES[0])["result"] is True
    assert minions.applied == [NODES[1]]
    runner.record(NODES[0])
    assert minions.applied == [NODES[1]]


@pytest.mark.parametrize("kind", ["failing", "applying"])
def test_a_node_forgets_what_is_recorded_when_it_has_the_configuration(
    runner: ModuleType, minions: Minions, kind: str
) -> None:
    minions.outboxes[NODES[2]] = ["a"]
    setattr(minions, kind, {NODES[2]: "it failed"})
    assert runner.record(NODES[2])["nodes"] == {NODES[2]: {"recorded": 1, "refused": []}}
    assert minions.outboxes[NODES[2]] == ["a"]
    setattr(minions, kind, {})
    assert runner.record(NODES[2])["result"] is True
    assert minions.outboxes[NODES[2]] == []


def test_one_call_works_at_a_time_and_takes_what_comes_meanwhile(
    runner: ModuleType, minions: Minions
) -> None:
    minions.outboxes.update({NODES[1]: ["a"], NODES[2]: ["b"]})
    left: list[Any] = []

    def meanwhile() -> None:
        left.extend(runner.record(node) for node in (NODES[2], NODES[2]))

    minions.at_work = meanwhile
    told = runner.record(NODES[1])
    assert [one["comment"] for one in left] == ["another call of brine.record does this now"] * 2
    assert minions.recorded == [(NODES[1], ["a"]), (NODES[2], ["b"])]
    assert told["comment"] == "2 events are recorded"
    # A burst is one redistribution.
    assert sorted(minions.applied) == sorted(NODES)


def test_the_instances_of_all_nodes(runner: ModuleType, minions: Minions) -> None:
    minions.silent = {NODES[2]}
    assert runner.list_() == {
        NODES[0]: {},
        NODES[1]: {"web1.example.com": "running"},
        NODES[2]: "has not answered",
    }
    for name in ("web1", "web1.example.com", "u1"):
        told = runner.find(name)
        assert told["comment"] == f"{name} is on node2.example.com"
        assert told["nodes"][NODES[1]]["status"] == "running"
        assert told["unknown"] == {NODES[2]: "has not answered"}
    assert (runner.find("web")["result"], runner.find("web")["retcode"]) == (False, 1)


def test_a_name_that_is_a_number_is_found_and_recorded(
    runner: ModuleType, minions: Minions, tmp_path: Path
) -> None:
    minions.instances[NODES[1]] = [{**WEB1, "name": "100"}]
    assert runner.find(100)["comment"] == "100 is on node2.example.com"
    assert runner.record(100)["comment"] == "100 is no node of the cluster"


RUBBISH: list[Any] = [[{}], [{"name": "web1"}], [{"name": 5, "status": []}], [5], {}, None, b"x"]


@pytest.mark.parametrize("said", RUBBISH)
def test_a_node_that_answers_nonsense_hides_no_other(
    runner: ModuleType, minions: Minions, said: Any
) -> None:
    minions.instances[NODES[2]] = said
    assert runner.list_()[NODES[1]] == {"web1.example.com": "running"}
    told = runner.find("web1")
    assert (told["result"], told["unknown"]) == (True, {NODES[2]: said})
    told = runner.health()
    assert told["result"] is False
    assert [*told["stale"]] == [NODES[2]]
    assert "its instances are not known" in told["stale"][NODES[2]][0]


@pytest.mark.parametrize("said", [{"a": "rubbish"}, {"a": {"name": "a"}}, {}, [], "failed", None])
def test_a_node_that_answers_nonsense_about_states_has_failed(
    runner: ModuleType, minions: Minions, said: Any
) -> None:
    minions.applying = {NODES[1]: said}
    for told in (runner.redistribute(), runner.redistribute(test=True)):
        assert told["result"] is False
        assert [name for name, one in told["nodes"].items() if one["failed"]] == [NODES[1]]
    assert [*runner.health()["stale"]] == [NODES[1]]


def test_health_knows_what_would_change_without_changes(
    runner: ModuleType, minions: Minions
) -> None:
    stopped = {"name": "brine-confd.service", "result": None, "comment": "is set to start"}
    minions.applying = {NODES[1]: {"b": {**stopped, "changes": {}, "__run_num__": 1}}}
    told = runner.health()
    assert (told["result"], told["stale"]) == (False, {NODES[1]: ["brine-confd.service"]})


def test_minions_that_answer_as_the_same_node_are_not_believed(
    runner: ModuleType, minions: Minions, tmp_path: Path
) -> None:
    short = "node3"
    give_nodes(tmp_path, [*NODES[:2], short])
    minions.others = ["node3.customer.org"]
    for table in (minions.instances, minions.outboxes):
        table["node3.customer.org"] = table[NODES[2]]
    minions.outboxes[NODES[1]] = ["a"]
    reason = (
        "the minions node3.customer.org, node3.example.com answer as the same node: "
        "give it its whole name in the configuration"
    )
    told = runner.record()["nodes"]
    assert told[short] == {"recorded": 0, "refused": [f"its outbox is not known: {reason}"]}
    assert told[NODES[1]]["recorded"] == 1
    assert runner.list_()[short] == reason
    assert reason in runner.health()["stale"][short][0]
    told = runner.redistribute()
    assert told["nodes"][short] == {"changed": [], "failed": [reason]}
    minions.silent = {"node3.customer.org"}
    assert runner.redistribute()["result"] is True


def test_a_node_without_the_command_for_instances_is_well(
    runner: ModuleType, minions: Minions
) -> None:
    minions.instances = dict.fromkeys(NODES, "brine: error: there is no command instance")
    minions.parts = ["config"]
    assert runner.health()["result"] is True


def test_health(runner: ModuleType, minions: Minions) -> None:
    minions.outboxes[NODES[1]] = ["bad1"]
    told = runner.health()
    assert told["result"] is True
    assert told["nodes"][NODES[1]] == {
        "version": "0.2.0",
        "serial": None,
        "instances": {"running": 1},
        "not_in_configuration": [],
        "not_recorded": 1,
    }
    assert told["nodes"][NODES[0]]["serial"] == 7
    minions.instances[NODES[2]] = [{**WEB1, "name": "lost.example.com", "uuid": "u9"}]
    told = runner.health()
    assert told["result"] is True
    assert told["nodes"][NODES[2]]["not_in_configuration"] == ["lost.example.com"]
    minions.serials[NODES[1]] = 6
    told = runner.health()
    assert (told["result"], told["stale"]) == (False, {NODES[1]: ["serial 6; this host has 7"]})
    # A node that boasts makes no other one stale.
    minions.serials[NODES[1]] = 10**9
    assert [*runner.health()["stale"]] == [NODES[1]]
    minions.serials[NODES[1]] = 7
    minions.outboxes[NODES[1]] = "it failed"
    assert runner.health()["stale"] == {NODES[1]: ["its outbox is not known: it failed"]}
    minions.outboxes[NODES[1]] = []
    minions.silent = {NODES[2]}
    told = runner.health()
    assert (told["result"], told["not_answered"]) == (False, [NODES[2]])
    assert "stale" not in told
