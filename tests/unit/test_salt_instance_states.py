"""The states of instances, on what the ``brine`` command prints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from unit.salt_loader import execution_module, load

SPEC = {"name": "web1", "memory_mib": 1024, "admin_state": "down", "admin_state_source": "admin"}
SPEC |= {"user_shutdown": "stop"}


@dataclass
class Brine:
    """A ``brine`` command that knows of at most one instance, and what it was told to do."""

    seen: dict[str, Any] | None = None
    refusal: str = ""
    silence: str = ""
    units: str = ""
    installed: bool = True
    live: dict[str, Any] = field(default_factory=dict)
    done: list[list[str]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    defined: dict[str, Any] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)

    def run_all(self, command: list[str], stdin: str = "", **_: Any) -> dict[str, Any]:
        """Answer as Salt's cmd.run_all does."""
        if command[0] == "systemctl":
            return _output(self.units)
        assert command[:2] == ["brine", "instance"]
        assert command[-1] == "--json"
        assert ("--live" in command) is (command[2] == "define")
        assert ("--keep-user-state" in command) is (command[2] == "define")
        verb, command = command[2], command[2:-1]
        self.asked.append(verb)
        if verb == "info" and self.silence:
            return {"retcode": 1, "stdout": "", "stderr": self.silence}
        if verb == "info":
            return _output(json.dumps(self.seen))
        if verb == "list":
            return _output(json.dumps([self.seen] if self.seen else []))
        if self.refusal:
            return {"retcode": 1, "stdout": "", "stderr": self.refusal}
        declared = json.loads(stdin) if verb == "define" else None
        if isinstance(declared, list):
            results = [self._definition(one) for one in declared]
            return _output(json.dumps({"instances": results, "dry_run": True}))
        self.done.append(command)
        if verb != "define":
            return _output(json.dumps({"name": "web1", "result": "done"}))
        self.defined = declared or {}
        return _output(json.dumps(self._definition(self.defined)))

    def _definition(self, declared: Mapping[str, Any]) -> dict[str, Any]:
        if "memory_mb" in declared:
            return {"name": declared["name"], "error": "/memory_mb: there is no such key"}
        seen = self.seen if self.seen and self.seen["name"] == declared["name"] else {}
        before = seen.get("spec", {})
        after = {**SPEC, **before, **declared}
        if before.get("admin_state_source") == "user" and after["admin_state"] != "offline":
            after |= {key: before[key] for key in ("admin_state", "admin_state_source")}
        elif after["admin_state"] != "down":
            after["admin_state_source"] = "admin"
        result = {"name": declared["name"], "changed": after != before, "spec": after}
        result |= {"before": before or None, "state": seen or None, "live_errors": []}
        result |= {"attached": [], "detached": [], "restart_pending": seen.get("restart_pending")}
        return {**result, **self.live}

    def file_exists(self, path: str) -> bool:
        """Answer as Salt's file.file_exists does."""
        if path.startswith("/usr/lib/systemd/"):
            return self.installed
        return path == "/var/lib/brine/instances/web1.json" and self.seen is not None


def _output(text: str) -> dict[str, Any]:
    return {"retcode": 0, "stdout": text, "stderr": ""}


def seen(
    status: str, oper_state: str, *, why: str = "", held_back: str | None = None, **spec: Any
) -> dict[str, Any]:
    """The facts about an instance, as ``brine instance list`` and ``info`` print them."""
    whole = {**SPEC, **spec}
    said = {key: whole[key] for key in ("name", "admin_state", "admin_state_source")}
    said |= {"status": status, "oper_state": oper_state, "why": why, "held_back": held_back}
    return {"restart_pending": None, **said, "spec": whole}


RUNNING = seen("running", "running", admin_state="up")
CRASHED = seen("ERROR_down", "down", admin_state="up")
STOPPED = seen("ADMIN_down", "down")
SHUT_DOWN = seen("USER_down", "S", admin_state="up", why="its user shut it down")
SHUT_DOWN_FOR_GOOD = seen("USER_down", "down", admin_state_source="user")


def state(
    brine: Brine,
    *,
    test: bool = False,
    lowstate: Sequence[Mapping[str, Any]] = (),
    ran: Mapping[str, Mapping[str, Any]] | None = None,
) -> ModuleType:
    """The state module, as Salt loads it, with this command.

    :param lowstate: the states of a run; none is a state that runs alone.
    :param ran: the results of those before it, by their tags.
    """
    functions = {
        "brine.ask": execution_module(brine.run_all).ask,
        "cmd.run_all": brine.run_all,
        "file.file_exists": brine.file_exists,
        "file.directory_exists": brine.folders.__contains__,
    }
    given = {"__opts__": {"test": test}, "__context__": {}, "__lowstate__": lowstate}
    given["__running__"] = ran or {}
    return load("states", "brine_instance", __salt__=functions, **given)


@pytest.mark.parametrize("test", [False, True])
@pytest.mark.parametrize(
    ("before", "spec", "changes", "comment"),
    [
        (None, {"memory_mib": 512}, {"web1": {"old": None, "new": "defined"}}, "defined"),
        (STOPPED, {"memory_mib": 1024}, {}, "is as declared"),
        (STOPPED, {"memory_mib": 512}, {"memory_mib": {"old": 1024, "new": 512}}, "defined"),
        (RUNNING, {"memory_mib": 512}, {"memory_mib": {"old": 1024, "new": 512}}, "defined"),
    ],
)
def test_a_definition_says_what_it_changes(
    before: dict[str, Any] | None,
    spec: dict[str, Any],
    changes: dict[str, Any],
    comment: str,
    test: bool,
) -> None:
    brine = Brine(before)
    result = state(brine, test=test).defined("web1", spec)
    assert result["changes"] == changes
    assert result["result"] is (None if changes and test else True)
    assert comment in result["comment"]
    assert ("--dry-run" in brine.done[0]) is test
    assert brine.defined["name"] == "web1"


@pytest.mark.parametrize(
    ("disk", "coming", "default", "waits"),
    [
        ({"unit": "/srv/vms"}, ["/srv/vms unit"], "", True),
        ({}, ["vg1 default"], "vg1", True),
        ({"unit": ""}, ["vg1 default"], "vg1", True),
        ({}, ["/srv/vms unit"], "/srv/vms", True),
        ({}, ["/srv/vms unit"], "", False),
        ({}, ["/srv/vms unit"], "vg1", False),
        ({"unit": "vg1"}, ["/srv/vms unit", "vg1 default"], "vg1", False),
        ({"unit": "/dev/sdb"}, ["/dev/sdb allocatable"], "", False),
        ({}, ["/dev/sdb allocatable"], "vg1", False),
        ({"unit": "/srv/old"}, ["/srv/old absent"], "", False),
        ({"unit": "/srv/vms", "size_mib": 0}, ["/srv/vms unit"], "", False),
        ({}, [], "vg1", False),
    ],
)
def test_only_a_disk_whose_unit_a_trial_would_make_waits_for_it(
    disk: dict[str, Any], coming: list[str], default: str, waits: bool
) -> None:
    made = [one.split() for one in coming]
    ran: dict[str, Any] = {
        f"brine_storage_|-the {name}_|-{name}_|-{how}": {"result": None, "changes": {name: {}}}
        for name, how in made
    }
    lowstate = [{"state": "brine_storage", "fun": "default", "name": default}] if default else []
    lowstate += [{"state": "test", "fun": "nop", "name": "web1"}]
    brine = Brine(refusal="brine: error: web1: no")
    spec = {"disks": [{"name": "data", "size_mib": 16, **disk}]}
    result = state(brine, test=True, lowstate=lowstate, ran=ran).defined("web1", spec)
    assert result["result"] is (None if waits else False)
    assert "web1: no" in result["comment"]


def test_what_waits_for_a_reboot_is_told() -> None:
    brine = Brine({**RUNNING, "restart_pending": ["memory_mib", "nics"]})
    module = state(brine)
    for result in (module.defined("web1", {"memory_mib": 512}), module.running("web1")):
        assert result["comment"].endswith("\nneeds a reboot: memory_mib, nics")
    at_once = Brine({**RUNNING, "restart_pending": []})
    assert state(at_once).defined("web1", {"start_order": 7})["comment"] == "web1 defined"
    assert state(at_once).running("web1")["comment"] == "web1 runs"


@pytest.mark.parametrize("test", [False, True])
def test_what_was_plugged_in_and_taken_out_is_a_change(test: bool) -> None:
    nic = {"kind": "nic", "uuid": "a", "mac": "aa:00:00:00:00:01", "link": "br0"}
    # The spec has it already: an earlier run could not plug it in.
    brine = Brine({**RUNNING, "restart_pending": []}, live={"attached": [nic]})
    for lowstate in ([], [low("defined", "web1", spec={})]):
        result = state(brine, test=test, lowstate=lowstate).defined("web1", {})
        assert (result["result"], result["changes"]) == (
            None if test else True,
            {"attached": [nic]},
        )
    brine.live = {"detached": [nic], "live_errors": ["web1: disk /d is not plugged in: no"]}
    result = state(brine, test=test).defined("web1", {})
    assert (result["result"], result["changes"]) == (False, {"detached": [nic]})
    assert result["comment"] == "web1: disk /d is not plugged in: no"


@pytest.mark.parametrize(
    ("before", "wanted", "stays"),
    [
        (SHUT_DOWN_FOR_GOOD, "up", True),
        (SHUT_DOWN_FOR_GOOD, "down", True),
        (SHUT_DOWN_FOR_GOOD, "offline", False),
        (STOPPED, "up", False),
        (RUNNING, "down", False),
    ],
)
def test_a_definition_keeps_what_a_user_has_said(
    before: dict[str, Any], wanted: str, stays: bool
) -> None:
    result = state(Brine(before)).defined("web1", {"admin_state": wanted})
    assert ("its user has shut it down, and that stays" in result["comment"]) is stays
    assert (result["changes"] == {}) is stays


@pytest.mark.parametrize("test", [False, True])
def test_what_a_claim_has_set_aside_is_left_alone(test: bool) -> None:
    brine = Brine({**STOPPED, "status": "elsewhere"})
    result = state(brine, test=test).elsewhere("web1", "n2.example.com")
    assert (result["result"], result["changes"], brine.done) == (True, {}, [])
    assert "n2.example.com" in result["comment"]


@pytest.mark.parametrize("spec", [["memory_mib"], "512", {"name": "web2"}])
def test_what_is_no_spec_of_it_is_refused(spec: Any) -> None:
    brine = Brine()
    result = state(brine).defined("web1", spec)
    assert result["result"] is False
    assert result["comment"].startswith("web1: its spec ")
    assert brine.done == []


@pytest.mark.parametrize("test", [False, True])
@pytest.mark.parametrize(
    ("function", "before"),
    [("defined", None), ("running", STOPPED), ("stopped", RUNNING), ("absent", STOPPED)],
)
def test_what_the_command_refuses_is_the_comment(
    function: str, before: dict[str, Any] | None, test: bool
) -> None:
    brine = Brine(before, refusal="brine: error: web1: no")
    result = getattr(state(brine, test=test), function)("web1")
    if function == "defined" or not test:
        assert (result["result"], result["changes"]) == (False, {})
        assert result["comment"] == "brine: error: web1: no"
    else:
        assert result["result"] is None


@pytest.mark.parametrize("test", [False, True])
@pytest.mark.parametrize(
    ("before", "starts"),
    [
        (STOPPED, True),
        (CRASHED, True),
        (seen("ERROR_up", "running"), True),
        (seen("USER_down", "S", admin_state="up", user_shutdown="restart"), True),
        (RUNNING, False),
        (SHUT_DOWN, False),
        (SHUT_DOWN_FOR_GOOD, False),
        (seen("stopping", "stopping", admin_state="up"), False),
    ],
)
def test_what_is_down_is_started_but_not_against_its_users_will(
    before: dict[str, Any], starts: bool, test: bool
) -> None:
    brine = Brine(before)
    result = state(brine, test=test).running("web1")
    change = {"web1": {"old": before["status"], "new": "running"}}
    assert result["changes"] == (change if starts else {})
    assert result["result"] is (None if starts and test else True)
    assert brine.done == ([["start", "--keep-tries", "web1"]] if starts and not test else [])
    assert ("left alone" in result["comment"]) is (
        before["status"] in ("USER_down", "stopping")
    ) or starts


@pytest.mark.parametrize("test", [False, True])
@pytest.mark.parametrize("held_back", [None, "the watcher is paused until tomorrow"])
def test_what_the_watcher_holds_back_is_not_started(held_back: str | None, test: bool) -> None:
    brine = Brine({**CRASHED, "held_back": held_back})
    result = state(brine, test=test).running("web1")
    assert bool(result["changes"]) is not bool(held_back)
    assert result["result"] is (None if test and not held_back else True)
    assert not held_back or result["comment"] == f"web1 left alone: {held_back}"
    starts = [["start", "--keep-tries", "web1"]]
    assert brine.done == ([] if held_back or test else starts)


def test_what_qemu_has_stopped_is_not_started() -> None:
    why = "QEMU has stopped it: io-error"
    brine = Brine({**RUNNING, "status": "ERROR_halted", "why": why})
    result = state(brine).running("web1")
    assert (result["result"], result["changes"]) == (True, {})
    assert result["comment"] == f"web1 left alone: {why}"
    assert brine.done == []


@pytest.mark.parametrize("test", [False, True])
@pytest.mark.parametrize(
    ("before", "stops"), [(RUNNING, True), (CRASHED, True), (SHUT_DOWN, True), (STOPPED, False)]
)
def test_what_runs_or_should_is_stopped(before: dict[str, Any], stops: bool, test: bool) -> None:
    brine = Brine(before)
    result = state(brine, test=test).stopped("web1", force=True, timeout=5)
    assert bool(result["changes"]) is stops
    command = ["stop", "web1", "--force", "--timeout", "5"]
    assert brine.done == ([command] if stops and not test else [])


def test_a_running_instance_would_not_be_undefined() -> None:
    result = state(Brine(RUNNING), test=True).absent("web1")
    assert (result["result"], result["changes"]) == (False, {})
    result = state(Brine(STOPPED), test=True).absent("web1")
    assert result["changes"] == {"web1": {"old": "defined", "new": None}}


@pytest.mark.parametrize(
    ("function", "result"), [("running", None), ("stopped", True), ("absent", True)]
)
def test_of_an_instance_that_is_not_there(function: str, result: bool | None) -> None:
    brine = Brine()
    assert getattr(state(brine, test=True), function)("web1")["result"] is result
    assert brine.done == []


def low(function: str, name: str, **given: Any) -> dict[str, Any]:
    """A state of a run."""
    return {"state": "brine_instance", "fun": function, "name": name, **given}


@pytest.mark.parametrize("test", [False, True])
def test_one_process_asks_about_all_instances(test: bool) -> None:
    spec = {"memory_mib": 1024, "admin_state": "up"}
    others = [low("defined", f"web{number}", spec=spec) for number in range(2, 50)]
    wrong = [low("defined", "bad1", spec="512"), low("defined", "bad2", spec={"memory_mb": 1})]
    run = [*wrong, low("defined", "web1", spec=spec), low("running", "web1"), *others]
    brine = Brine(RUNNING)
    module = state(brine, test=test, lowstate=run)
    for function, arguments in (("defined", [spec]), ("running", []), ("defined", [spec])):
        result = getattr(module, function)("web1", *arguments)
        assert (result["result"], result["changes"]) == (True, {})
    assert brine.asked == ["define"]
    # What is to be changed takes one more, and so does what can't be defined.
    assert module.defined("web2", spec)["result"] is (None if test else True)
    assert brine.asked == ["define", *([] if test else ["define"])]


def test_each_run_looks_anew_and_so_does_what_acts() -> None:
    brine = Brine(RUNNING)
    module = state(brine, lowstate=[low("running", "web1"), low("stopped", "web1")])
    assert module.running("web1")["comment"] == "web1 runs"
    brine.seen = CRASHED
    # It ran when all were looked at; by now it is down, and should be up.
    assert module.stopped("web1")["changes"]["web1"]["old"] == "ERROR_down"
    assert brine.asked == ["list", "info", "stop"]
    brine.seen = STOPPED
    assert module.stopped("web1")["changes"] == {}
    assert brine.asked[3:] == ["info"]
    module.mod_init(low("stopped", "web1"))
    brine.seen = RUNNING
    assert module.running("web1")["comment"] == "web1 runs"
    assert brine.asked[4:] == ["list"]


@pytest.mark.parametrize("function", ["defined", "running", "stopped", "absent"])
def test_test_mode_works_where_nothing_is_installed(function: str) -> None:
    brine = Brine(installed=False)
    result = getattr(state(brine, test=True), function)("web1")
    assert (result["result"], result["changes"]) == (None, {})
    assert "would be installed first" in result["comment"]


def test_nothing_is_to_be_removed_while_an_instance_runs() -> None:
    units = "brine-instance@web1.service loaded active running Virtual machine web1\n"
    result = state(Brine(units=units)).none_running("x")
    assert result["result"] is False
    assert "as instances run: web1;" in result["comment"]
    assert state(Brine()).none_running("x")["result"] is True


def test_without_the_handler_no_instance_with_an_owner_may_run() -> None:
    units = "".join(f"brine-instance@{name}.service loaded active\n" for name in ("web1", "ci1"))
    brine = Brine(units=units)
    assert state(brine).none_running("x", owned=True)["result"] is True
    brine.folders.add("/run/brine/lifecycle/ci1")
    result = state(brine).none_running("x", owned=True)
    assert result["result"] is False
    assert "as instances with an owner run: ci1;" in result["comment"]
