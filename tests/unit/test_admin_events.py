"""What the cluster hears of instances where a change was cut off in the middle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.common import outbox
from brine.common.outbox import OutboxError
from brine.instance import intent, store
from brine.instance.intent import correct_events, keep_users_will, put_event
from brine.instance.operations import stop_instance
from brine.instance.spec import Spec
from brine.instance.start import start_instance
from brine.instance.validate import define
from lab.scripted_systemctl import ScriptedSystemctl

UP = {"admin_state": "up"}
BY_USER = {"admin_state": "down", "admin_state_source": "user"}


class KilledError(Exception):
    """Nothing is done after this."""


@pytest.fixture(autouse=True)
def systemctl(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSystemctl:
    """That of a node of its own."""
    return ScriptedSystemctl(own_node / "systemctl", monkeypatch)


def defined(name: str = "web1", **keys: Any) -> Spec:
    spec = define({"name": name, **keys})
    store.save(spec)
    return spec


def by_user(spec: Spec) -> Spec:
    return replace(spec, admin_state="down", admin_state_source="user")


def killed_before_it_saves(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(_: Spec) -> None:
        raise KilledError

    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr(store, "save", kill)
        work()


def told() -> list[tuple[object, object]]:
    return [(event.data["admin_state"], event.data["source"]) for event in outbox.events()]


@pytest.mark.parametrize(
    ("verb", "state"),
    [
        (lambda: start_instance("web1"), ("up", "admin")),
        (lambda: stop_instance("web1"), ("down", "admin")),
    ],
)
def test_an_admin_who_wants_what_the_spec_says_corrects_what_the_cluster_hears(
    verb: Callable[[], object], state: tuple[str, str]
) -> None:
    spec = defined(admin_state=state[0])
    put_event(by_user(spec))
    verb()
    assert told() == [state]
    (event,) = outbox.events()
    verb()
    assert list(outbox.events()) == [event]


def test_a_pass_corrects_it_after_a_users_will_that_was_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defined(**UP)
    killed_before_it_saves(lambda: keep_users_will("web1", is_told=True), monkeypatch)
    assert told() == [("down", "user")]
    for _ in range(2):
        assert correct_events(store.load_all()) == []
        assert told() == [("up", "admin")]


def test_and_after_a_start_that_was(monkeypatch: pytest.MonkeyPatch) -> None:
    defined(**BY_USER)
    killed_before_it_saves(lambda: start_instance("web1"), monkeypatch)
    assert told() == [("up", "admin")]
    assert correct_events(store.load_all()) == []
    assert told() == [("down", "user")]


def test_what_the_cluster_has_heard_or_hears_rightly_is_not_told_again() -> None:
    for name in ("web1", "web2"):
        put_event(defined(name, **BY_USER))
    (first, _) = outbox.events()
    outbox.acknowledge(first.id)
    defined("web3", **UP)
    (store.FOLDER / "web4.json").write_text("{")
    assert correct_events(store.load_all()) == []
    assert len(told()) == 1


def test_who_is_just_changing_it_is_left_to_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intent, "_LOCK_S", 0.0)
    put_event(defined(**BY_USER))
    spec = defined(**UP)
    with store.alone("web1"):
        assert correct_events([spec]) == []
    store.remove("web1")
    assert correct_events([spec]) == []
    assert told() == [("down", "user")]


def test_one_that_can_not_be_corrected_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [defined(name, **UP) for name in ("web1", "web2")]
    for spec in specs:
        put_event(by_user(spec))
    put = outbox.put

    def full(*args: Any, name: str, **keys: Any) -> object:
        if name == "web1":
            raise OutboxError("no room")
        return put(*args, name=name, **keys)

    monkeypatch.setattr(outbox, "put", full)
    assert [str(error) for error in correct_events(specs)] == ["no room"]
    assert [event.name for event in outbox.events()][-1] == "web2"


def test_an_outbox_that_can_not_be_read_is_told(own_node: Path) -> None:
    (own_node / "outbox").write_text("")
    (error,) = correct_events([])
    assert "can't be read" in str(error)
