"""What a node notes of its instances when it shuts down."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from brine.common.markers import UNKNOWN_RUN, MarkerKind, file_of, write_marker
from brine.instance import intent, store
from brine.instance.intent import forget_user_shutdown, stays_off
from brine.instance.observe import Observed
from brine.instance.service.node_shutdown import keep_users_wills
from brine.instance.spec import Spec
from brine.instance.validate import define
from lab.scripted_systemctl import ScriptedSystemctl


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
    seen = Observed(spec, has_user_marker=shut_down)
    assert stays_off(seen) is noted


def test_a_mark_that_can_not_be_removed_keeps_no_other(
    own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ScriptedSystemctl(own_node / "systemctl", monkeypatch)
    for name in ("web1", "web2"):
        store.save(define({"name": name, "admin_state": "up"}))
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
    ScriptedSystemctl(own_node / "systemctl", monkeypatch)
    store.save(define({"name": "web1", "admin_state": "up", "user_shutdown": user_shutdown}))
    for kind in (MarkerKind.START, MarkerKind.STARTED):
        write_marker(kind, "web1", run="0d" * 16)
    write_marker(MarkerKind.VERDICT, "web1", run="0d" * 16, who="unknown", cause="kvmd is off")
    assert keep_users_wills() == []
    assert store.load("web1").admin_state == state
