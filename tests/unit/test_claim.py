"""Claims: an instance is defined and runs on the node that its newest claim names, and nowhere
else."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from brine.common import paths
from brine.common.errors import BrineError
from brine.instance import store
from brine.instance.claim_changes import forget_claim, give_away, set_aside, take
from brine.instance.claims import note_of, notes
from brine.instance.observe import look
from brine.instance.operations import reboot_instance, resume_instance
from brine.instance.registry import define_instance, undefine_instance
from brine.instance.service import run
from brine.instance.start import start_instance
from brine.instance.store import InstanceError
from brine.vm.claim import UNCLAIMED, Claim
from brine.vm.spec import SpecError
from brine.watcher.decide import decide
from brine.watcher.restart_counter import NONE
from brine.watcher.settings import WatcherSettings
from lab.ganeti_config import ganeti_config, instance_name, node_name, uuid_of
from lab.scripted_systemctl import ScriptedSystemctl

HERE, THERE = "n1.example.com", "n2.example.com"
UUID = "9fb0b0f9-1d3a-4f8e-8f4e-6a4f1e1b2c3d"


@pytest.fixture(autouse=True)
def node(own_node: Path, monkeypatch: pytest.MonkeyPatch, systemctl: ScriptedSystemctl) -> Path:
    """A node of the name HERE."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=HERE))
    return own_node


# The rule itself.

CASES = [
    (Claim(), Claim(), ""),
    (Claim(HERE), Claim(), ""),
    (Claim(HERE, 7), Claim(), ""),
    (Claim(HERE, 7), Claim(HERE, 7), ""),
    (Claim(HERE, 8), Claim(THERE, 7), ""),
    (Claim(HERE, 8), Claim(HERE, 7), ""),
    (Claim(), Claim(HERE, 7), ""),
    (Claim(THERE), Claim(), f"is {THERE}'s"),
    (Claim(THERE, 7), Claim(), f"is {THERE}'s by serial 7"),
    (Claim(THERE, 9), Claim(HERE, 7), f"is {THERE}'s by serial 9"),
    (Claim(), Claim(THERE, 7), f"is {THERE}'s by serial 7"),
    (Claim(HERE), Claim(THERE, 7), f"is {THERE}'s by serial 7"),
    (Claim(HERE, 6), Claim(THERE, 7), "serial 6 of the configuration is old"),
    (Claim(HERE, 6), Claim(HERE, 7), "serial 6 of the configuration is old"),
    (Claim(HERE, 7), Claim(THERE, 7), f"is {THERE}'s by serial 7"),
]


@pytest.mark.parametrize(("claim", "seen", "fault"), CASES)
def test_the_newest_claim_counts_and_it_names_this_node(
    claim: Claim, seen: Claim, fault: str
) -> None:
    found = claim.fault(seen, lambda name: name == HERE)
    assert fault in (found or "")
    assert bool(found) == bool(fault)


def test_of_two_claims_no_two_nodes_may_run_it() -> None:
    """Whatever two claims two nodes have heard, in whichever order: if each has heard both, at most
    one of them runs the instance by a claim of the configuration."""
    claims = [Claim(node, serial) for node in (HERE, THERE) for serial in (1, 2, 3)]
    for one, other in itertools.product(claims, repeat=2):
        if one.serial == other.serial and one != other:
            continue  # no configuration has both
        newest = max(one, other, key=lambda claim: claim.serial)
        for node in (HERE, THERE):
            is_here = node.__eq__
            runs = [
                claim
                for claim, seen in ((one, other), (other, one))
                if claim.fault(seen, is_here) is None
            ]
            assert all(claim.node == node == newest.node for claim in runs)


# Definitions.


def defined(serial: int = 0, node: str = HERE, **keys: Any) -> None:
    claim = {"node": node, "claim_serial": serial} if serial else {}
    define_instance({"name": "web1", "uuid": UUID, **claim, **keys})


def test_a_spec_without_a_claim_is_defined_as_ever() -> None:
    defined(vcpus=2)
    defined(vcpus=3)
    assert store.load("web1").claim == UNCLAIMED
    assert "claim_serial" not in json.loads((paths.SPECS_DIR / "web1.json").read_text())
    assert not paths.CLAIMS_DIR.exists()


def test_the_release_before_reads_a_spec_with_a_claim() -> None:
    """It leaves out what it does not know of a newer version only."""
    file = paths.SPECS_DIR / "web1.json"
    for serial, version in ((0, 1), (7, 2), (8, 2)):
        defined(serial)
        assert json.loads(file.read_text())["version"] == version
        assert (store.load("web1").version, store.load("web1").claim_serial) == (1, serial)
    forget_claim("web1")
    assert json.loads(file.read_text())["version"] == 1


def test_a_definition_that_names_no_claim_keeps_the_present_one() -> None:
    defined(7)
    define_instance({"name": "web1", "vcpus": 3})
    assert store.load("web1").claim == Claim(HERE, 7)
    define_instance({"name": "web1", "vcpus": 4, "node": "n1"})
    assert store.load("web1").claim == Claim("n1", 7)


def test_a_newer_claim_alone_is_no_change_of_the_instance() -> None:
    defined(vcpus=2)
    for serial in (7, 8):
        claim = {"node": HERE, "claim_serial": serial}
        done = define_instance({"name": "web1", "uuid": UUID, "vcpus": 2, **claim})
        assert not done.changed
        assert store.load("web1").claim == Claim(HERE, serial)


def test_a_claim_names_a_node() -> None:
    with pytest.raises(SpecError, match="/claim_serial: goes with a node"):
        define_instance({"name": "web1", "claim_serial": 7})


@pytest.mark.parametrize("given", [{}, {"node": HERE}, {"node": HERE, "claim_serial": 6}])
@pytest.mark.parametrize("is_undefined", [False, True])
def test_what_another_node_has_is_defined_by_a_newer_claim_alone(
    given: dict[str, Any], *, is_undefined: bool
) -> None:
    """Pillar that names the old node still, an old copy of the configuration: it is refused in one
    line, which names the other node, also when the spec has gone."""
    defined(6)
    assert set_aside("web1", UUID, Claim(THERE, 7))
    if is_undefined:
        undefine_instance("web1")
        assert not store.spec_file_of("web1").exists()
    for uuid in ({}, {"uuid": UUID}):
        if "claim_serial" in given and not uuid:
            continue  # a configuration has its UUID
        with pytest.raises(SpecError, match=f"{THERE}'s") as caught:
            define_instance({"name": "web1", **uuid, **given})
        assert "\n" not in str(caught.value)
        assert caught.value.hint
        assert "brine node claims --forget web1" in caught.value.hint
    define_instance({"name": "web1", "uuid": UUID, "node": HERE, "claim_serial": 8})
    assert store.load("web1").claim == Claim(HERE, 8)
    assert notes() == []


def test_a_new_name_is_no_way_around_a_claim() -> None:
    defined(6)
    set_aside("web1", UUID, Claim(THERE, 7))
    undefine_instance("web1")
    with pytest.raises(SpecError, match=f"is {THERE}'s by serial 7"):
        define_instance({"name": "web2", "uuid": UUID})


def test_another_instance_may_have_the_name() -> None:
    """The configuration has given its name to a new object, whose serials begin anew."""
    defined(6)
    set_aside("web1", UUID, Claim(THERE, 7))
    undefine_instance("web1")
    other = UUID.replace("9", "8")
    define_instance({"name": "web1", "uuid": other, "node": HERE, "claim_serial": 1})
    assert store.load("web1").claim == Claim(HERE, 1)


# What may run: one check for all.


def test_what_is_set_aside_is_not_started() -> None:
    defined(6, admin_state="up")
    set_aside("web1", UUID, Claim(THERE, 7))
    with pytest.raises(InstanceError, match=f"web1: is {THERE}'s by serial 7"):
        start_instance("web1")


def test_its_unit_starts_it_not_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when systemctl alone starts the unit."""
    defined(6, admin_state="up")
    set_aside("web1", UUID, Claim(THERE, 7))
    monkeypatch.setattr("sys.argv", ["run", "web1"])
    with pytest.raises(SystemExit):
        run.main()
    assert f"web1: is {THERE}'s by serial 7" in capsys.readouterr().err


def test_neither_the_boot_nor_the_watcher_starts_it_and_the_list_names_its_node(
    brine: Callable[..., tuple[int, str, str]],
) -> None:
    defined(6, admin_state="up")
    seen = look("web1")
    assert seen.state.status == "ERROR_down"
    assert decide(seen, NONE, WatcherSettings(), 1e9).actions
    set_aside("web1", UUID, Claim(THERE, 7))
    seen = look("web1")
    assert seen.state.status == "elsewhere"
    assert THERE in seen.state.why
    decision = decide(seen, NONE, WatcherSettings(), 1e9)
    assert decision.actions == ()
    assert THERE in decision.why
    status, out, _ = brine("start", "--all")
    assert (status, out.startswith("not started: web1: is "), THERE in out) == (0, True, True)


@pytest.mark.parametrize("way", [resume_instance, reboot_instance])
def test_a_qemu_that_is_left_here_goes_not_on(
    way: Callable[[str], object], systemctl: ScriptedSystemctl
) -> None:
    defined(6, admin_state="up")
    systemctl.unit("brine-instance@web1.service", ActiveState="active", InvocationID="17")
    give_away("web1", THERE, 7, is_live=True)
    seen = look("web1")
    assert (seen.state.oper, seen.state.status) == ("running", "ERROR_up")
    assert decide(seen, NONE, WatcherSettings(), 1e9).actions == ()
    with pytest.raises(InstanceError, match=f"is {THERE}'s by serial 7"):
        way("web1")


# Giving and taking.


def test_one_gives_before_the_other_takes() -> None:
    defined(6)
    give_away("web1", THERE, 7)
    give_away("web1", THERE, 7)  # again, as after a kill
    assert store.load("web1").claim == Claim(THERE, 7)
    with pytest.raises(InstanceError, match="not this node's to give"):
        give_away("web1", "n3.example.com", 8)
    with pytest.raises(InstanceError, match="serial 7, and 7 is no later"):
        take("web1", Claim(HERE, 7))
    with pytest.raises(InstanceError, match="is not this node"):
        take("web1", Claim(THERE, 8))
    for _ in range(2):
        take("web1", Claim(HERE, 8))
        assert store.load("web1").claim == Claim(HERE, 8)


def test_what_runs_is_given_away_by_a_live_move_alone(systemctl: ScriptedSystemctl) -> None:
    defined(6, admin_state="up")
    systemctl.unit("brine-instance@web1.service", ActiveState="active", InvocationID="17")
    with pytest.raises(InstanceError, match="runs"):
        give_away("web1", THERE, 7)
    assert store.load("web1").claim == Claim(HERE, 6)


def test_an_older_claim_sets_nothing_aside() -> None:
    defined(6)
    for claim in (Claim(THERE, 5), Claim(THERE, 6), Claim(HERE, 7)):
        assert not set_aside("web1", UUID, claim)
    assert not set_aside("web1", UUID.replace("9", "8"), Claim(THERE, 7))
    assert store.load("web1").claim == Claim(HERE, 6)


@pytest.mark.parametrize("killed_at", ["note", "spec"])
def test_an_undefine_that_is_killed_forgets_no_claim(
    monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    """At each step, the next start sees whose it is: by the spec, the note, or both."""
    defined(6)
    set_aside("web1", UUID, Claim(THERE, 7))

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store, "remove" if killed_at == "note" else "forget", killed)
        with pytest.raises(KeyboardInterrupt):
            undefine_instance("web1")
    assert store.spec_file_of("web1").exists() == (killed_at == "note")
    note = note_of(UUID)
    assert note
    assert note.claim == Claim(THERE, 7)
    with pytest.raises(BrineError, match=f"is {THERE}'s by serial 7"):
        define_instance({"name": "web1", "uuid": UUID})


def test_an_undefined_instance_of_this_node_leaves_no_note() -> None:
    defined(6)
    undefine_instance("web1")
    assert notes() == []
    defined(6)


def test_a_copied_instance_has_no_claim() -> None:
    defined(6)
    assert note_of(UUID) is None
    define_instance({"name": "web2"})
    assert store.load("web2").claim == UNCLAIMED


# The command.


def test_a_node_names_the_instances_of_others_and_forgets_them(
    brine: Callable[..., tuple[int, str, str]],
) -> None:
    brine_node = partial(brine, noun="node")
    assert brine_node("claims")[:2] == (0, "no instance of another node is known\n")
    defined(6)
    set_aside("web1", UUID, Claim(THERE, 7))
    (row,) = json.loads(brine_node("claims", "--json")[1])
    assert (row["name"], row["node"], row["serial"], row["defined"]) == ("web1", THERE, 7, True)
    undefine_instance("web1")
    (row,) = json.loads(brine_node("claims", "--json")[1])
    assert (row["name"], row["node"], row["serial"], row["defined"]) == ("web1", THERE, 7, False)
    assert THERE in brine_node("claims")[1]
    assert brine_node("claims", "--forget", "web1")[:2] == (0, "forgotten: the claim of web1\n")
    status, _, err = brine_node("claims", "--forget", "web1")
    assert (status, err.splitlines()[0]) == (2, "brine: error: web1: no claim is known here")
    define_instance({"name": "web1", "uuid": UUID})
    assert not forget_claim("web1")


def test_a_damaged_note_stops_its_own_instance_alone() -> None:
    defined()
    define_instance({"name": "web2"})
    paths.CLAIMS_DIR.mkdir()
    (paths.CLAIMS_DIR / f"{UUID}.json").write_text("{")
    with pytest.raises(BrineError, match="is damaged"):
        start_instance("web1")
    assert look("web1").bar
    assert look("web2").bar is None
    define_instance({"name": "web2", "vcpus": 2})


def test_the_configuration_says_whose_an_instance_is(
    brine: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=node_name(1)))
    data, name = ganeti_config(nodes=2, instances=1), instance_name(1)

    def define_all(node: int, serial: int) -> tuple[int, str]:
        data["instances"][uuid_of("instance", 1)] |= {
            "serial_no": serial,
            "primary_node": uuid_of("node", node),
        }
        status, _, err = brine("define", "--from-config", "--config", "-", stdin=data)
        return status, err

    assert define_all(1, 6)[0] == 0
    assert store.load(name).claim == Claim(node_name(1), 6)
    assert define_all(2, 7)[0] == 0
    assert look(name).state.status == "elsewhere"
    status, err = define_all(1, 6)  # an old copy
    assert status == 1
    assert "serial 6 of the configuration is old: by serial 7 it is node2.example.com's" in err
    assert define_all(1, 8)[0] == 0
    assert store.load(name).claim == Claim(node_name(1), 8)
