"""The beacon of Salt's side: what it sends, and when."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from unit.salt_loader import execution_module, load

EVENT = {"id": "1-a", "name": "web1"}
VERDICT = {"time": "2026-11-24T12:00:00.000001+00:00", "instance": "web1", "verdict": "user"}
_times = itertools.count(10**9)


class Node:
    """A node's folders, its `brine`, and a clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outbox, self.marks, self.now_s = folder / "outbox", folder / "marks", 1000.0
        self.answers: dict[str, Any] = {"outbox": {"said": []}, "kvmd": {"said": []}}
        self.commands: list[tuple[str, ...]] = []
        self._ask = mock.create_autospec(execution_module(None).ask, side_effect=self._answer)
        self.folder = folder
        self.beacon = self.loaded()
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)

    def loaded(self) -> ModuleType:
        """The beacon as Salt loads it, also anew."""
        opts = {"cachedir": str(self.folder)}
        beacon = load("beacons", "brine", __opts__=opts, __salt__={"brine.ask": self._ask})
        vars(beacon).update(_OUTBOX=str(self.outbox), _MARKS=str(self.marks), _KVMD="/")
        return beacon

    def _answer(self, *command: str, stdin: str = "") -> Any:
        self.commands.append(command)
        return self.answers[command[0]]

    def put(self, folder: Path, name: str) -> None:
        """Have a file be new in a folder."""
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
        self.touch(folder)

    def touch(self, folder: Path) -> None:
        moment_ns = next(_times) * 10**9
        os.utime(folder, ns=(moment_ns, moment_ns))

    def sent(self) -> list[dict[str, Any]]:
        """The events that the beacon has for the master now."""
        found: list[dict[str, Any]] = self.beacon.beacon([{"_beacon_name": "brine"}])
        return found


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_while_nothing_changes_no_process_is_started(node: Node) -> None:
    node.put(node.marks, "web1.start")
    node.put(node.outbox, "1-a.damaged")
    assert node.sent() == []
    assert [command[0] for command in node.commands] == ["kvmd"]
    for _ in range(3):
        node.now_s += 1000
        assert node.sent() == []
    assert len(node.commands) == 1


def test_the_whole_outbox_is_sent_again_until_it_is_empty(node: Node) -> None:
    assert node.sent() == []
    node.put(node.outbox, "1-a.json")
    node.answers["outbox"] = {"said": [EVENT]}
    whole = [{"outbox": [EVENT], "verdicts": []}]
    assert node.sent() == whole
    for pause_s in (30, 60, 120, 240, 300, 300):
        node.now_s += pause_s - 1
        assert node.sent() == []
        node.now_s += 1
        assert node.sent() == whole
    assert node.commands == [("outbox", "list")]
    # What is new does not wait.
    node.put(node.outbox, "2-b.json")
    node.answers["outbox"] = {"said": [EVENT, EVENT]}
    assert node.sent() == [{"outbox": [EVENT, EVENT], "verdicts": []}]
    node.now_s += 30
    assert len(node.sent()) == 1

    for file in node.outbox.iterdir():
        file.unlink()
    node.touch(node.outbox)
    assert node.sent() == []
    node.now_s += 1000
    assert node.sent() == []
    assert len(node.commands) == 2


def test_an_event_that_comes_in_the_moment_of_a_look_is_sent(node: Node) -> None:
    node.put(node.outbox, "1-a.json.new")
    times = os.stat(node.outbox)
    assert node.sent() == []
    (node.outbox / "1-a.json.new").rename(node.outbox / "1-a.json")
    os.utime(node.outbox, ns=(times.st_atime_ns, times.st_mtime_ns))
    node.answers["outbox"] = {"said": [EVENT]}
    assert node.sent() == [{"outbox": [EVENT], "verdicts": []}]


def test_an_outbox_that_can_not_be_read_is_tried_again(node: Node) -> None:
    node.put(node.outbox, "1-a.json")
    node.answers["outbox"] = {"refused": "brine: error: ..."}
    assert node.sent() == []
    node.now_s += 29
    assert node.sent() == []
    node.answers["outbox"] = {"said": [EVENT]}
    node.now_s += 1
    assert node.sent() == [{"outbox": [EVENT], "verdicts": []}]


def test_each_verdict_is_sent_once(node: Node) -> None:
    node.put(node.marks, "web1.verdict")
    node.answers["kvmd"] = {"said": [VERDICT]}
    assert node.sent() == [{"outbox": [], "verdicts": [VERDICT]}]
    # The next one is asked for with a minute's overlap, also when Salt has loaded the beacon anew.
    other = {**VERDICT, "instance": "db1"}
    node.answers["kvmd"] = {"said": [VERDICT, other]}
    node.beacon = node.loaded()
    assert node.sent() == [{"outbox": [], "verdicts": [other]}]
    since = "2026-11-24T11:59:00.000001+00:00"
    assert node.commands[-1] == ("kvmd", "verdicts", "--since", since)
    node.touch(node.marks)
    assert node.sent() == []


def test_a_node_without_the_execution_module_sends_nothing(node: Node) -> None:
    vars(node.beacon)["__salt__"] = {}
    node.put(node.outbox, "1-a.json")
    assert node.sent() == []


@pytest.mark.parametrize(("config", "valid"), [([], True), ([{"interval": 5}], True), ({}, False)])
def test_its_configuration_is_checked(node: Node, config: Any, valid: bool) -> None:
    assert node.beacon.validate(config)[0] is valid
