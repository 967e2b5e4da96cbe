"""The admin state: a node's notes of it, and the events for the cluster."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.common import outbox, paths
from brine.common.outbox import OutboxError
from brine.instance import intent, store
from brine.instance.intent import (
    correct_events,
    forget_user_shutdown,
    keep_users_will,
    put_event,
    stays_off,
)
from brine.instance.service.node_shutdown import keep_users_wills
from brine.instance.start import start_instance
from brine.instance.stop import stop_instance
from brine.instance.validate import completed
from brine.vm.markers import UNKNOWN_RUN, MarkerKind, file_of, write_marker
from brine.vm.spec import AdminState, Source, Spec
from unit.runs import observed

pytestmark = pytest.mark.usefixtures("own_node", "systemctl")

UP = {"admin_state": "up"}
BY_USER = {"admin_state": "down", "admin_state_source": "user"}


class KilledError(Exception):
    """Nothing is done after this."""


def defined(name: str = "web1", **keys: Any) -> Spec:
    spec = completed({"name": name, **keys})
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
    (paths.SPECS_DIR / "web4.json").write_text("{")
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


# When the node shuts down.


@pytest.mark.parametrize(
    ("admin_state", "source", "user_shutdown", "shut_down", "noted"),
    [
        ("up", "admin", "stop", True, True),
        ("up", "admin", "stop", False, False),
        ("up", "admin", "restart", True, False),
        ("down", "admin", "stop", True, False),
        ("down", "user", "stop", True, True),  # the cluster may not have heard
        ("down", "user", "stop", False, False),
        ("offline", "admin", "stop", True, False),
    ],
)
def test_only_what_should_be_up_and_its_user_shut_down_for_good(
    admin_state: str, source: str, user_shutdown: str, shut_down: bool, noted: bool
) -> None:
    spec = Spec(
        name="web1", admin_state=admin_state, admin_state_source=source, user_shutdown=user_shutdown
    )
    seen = observed(spec, marks=(MarkerKind.SHUTDOWN,) if shut_down else ())
    assert stays_off(seen) is noted


def test_a_mark_that_can_not_be_removed_keeps_no_other(
    own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("web1", "web2"):
        defined(name, **UP)
    write_marker(MarkerKind.SHUTDOWN, "web1", run=UNKNOWN_RUN)

    def refused(name: str) -> None:
        if name == "web1":
            raise OSError(
                errno.EROFS, "Read-only file system", str(file_of(MarkerKind.SHUTDOWN, name))
            )
        forget_user_shutdown(name)

    monkeypatch.setattr(intent, "forget_user_shutdown", refused)
    write_marker(MarkerKind.SHUTDOWN, "web2", run=UNKNOWN_RUN)
    (error,) = keep_users_wills()
    assert str(error).startswith("web1: ")
    assert "web1.shutdown: can't be changed: Read-only file system" in str(error)
    assert {store.load(name).admin_state_source for name in ("web1", "web2")} == {"user"}


@pytest.mark.parametrize(("user_shutdown", "state"), [("stop", "down"), ("restart", "up")])
def test_one_of_which_only_kvmd_could_know_stays_off_where_that_is_off(
    own_node: Path, monkeypatch: pytest.MonkeyPatch, user_shutdown: str, state: str
) -> None:
    defined(**UP, user_shutdown=user_shutdown)
    for kind in (MarkerKind.START, MarkerKind.STARTED):
        write_marker(kind, "web1", run="0d" * 16)
    write_marker(MarkerKind.VERDICT, "web1", run="0d" * 16, who="unknown", cause="kvmd is off")
    assert keep_users_wills() == []
    assert store.load("web1").admin_state == state


def test_an_end_with_its_owner_changes_nobodys_will_that_it_is_down() -> None:
    spec = defined(**BY_USER)
    assert not intent.want(spec, AdminState.DOWN, Source.OWNER)
    assert store.load("web1") == spec
    up = defined(**UP)
    assert intent.want(up, AdminState.DOWN, Source.OWNER)
    assert store.load("web1").admin_state_source == Source.OWNER
