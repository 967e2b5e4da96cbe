"""The Salt states of the watcher."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import pytest

from lab.errors import LabError
from lab.node import Node
from lab.salt import StateResult, apply_state, give_states

TIMER = "brine-watcher.timer"
SETTINGS = "/etc/brine/watcher.toml"
DROP_IN = "/etc/systemd/system/brine-watcher.timer.d/salt.conf"


def applied(
    node: Node, watcher: Mapping[str, Any] | None, *, test: bool = False, **others: Any
) -> dict[str, StateResult]:
    """Apply another pillar, and return what was changed, or would be, by name."""
    give_states(node, {"brine": {"instance": {"enabled": True}, "watcher": watcher, **others}})
    results = apply_state(node, test=test)
    return {one.name: one for one in results if one.result is None or one.changes}


def timer_states(node: Node) -> list[str]:
    """Whether the timer is active, and whether it is enabled."""
    asked = [["systemctl", verb, TIMER] for verb in ("is-active", "is-enabled")]
    return [node.run(one, check=False).stdout.strip() for one in asked]


def next_passes(node: Node) -> list[str]:
    """The timer's settings, as systemd has them."""
    shown = node.run(["systemctl", "show", "--property=TimersCalendar", "--value", TIMER]).stdout
    return [line.split("=")[1].split(" ;")[0] for line in shown.splitlines() if line]


def test_test_mode_says_what_it_would_do_and_does_nothing(node: Node) -> None:
    would = applied(node, {"settings": {"interval": 60}}, test=True)
    assert {TIMER, SETTINGS, DROP_IN} <= would.keys()
    assert not node.path("/etc/brine").exists()


def test_a_node_that_runs_instances_has_it_and_the_second_run_changes_nothing(node: Node) -> None:
    applied(node, None)
    assert timer_states(node) == ["active", "enabled"]
    assert next_passes(node) == ["*-*-* *:00/5:00"]
    assert not node.path(SETTINGS).exists()
    assert not node.path(DROP_IN).exists()
    assert applied(node, None) == {}
    assert applied(node, None, test=True) == {}


@pytest.mark.parametrize(
    ("interval", "passes"),
    [
        (20, "*-*-* *:*:00/20"),
        (60, "*-*-* *:00/1:00"),
        (3599, "*-*-* 00/1:00:00"),
        (7200, "*-*-* 00/2:00:00"),
        (86400, "*-*-* 00:00:00"),
    ],
)
def test_the_timer_follows_the_interval(node: Node, interval: int, passes: str) -> None:
    pillar = {"settings": {"interval": interval, "tries": 7}}
    applied(node, pillar)
    assert tomllib.loads(node.read(SETTINGS)) == pillar["settings"]
    assert next_passes(node) == [passes]
    assert timer_states(node) == ["active", "enabled"]
    assert applied(node, pillar) == {}


def test_a_mistake_in_pillar_changes_nothing(node: Node) -> None:
    before = node.read(SETTINGS), node.read(DROP_IN)
    for settings, said in (
        ({"trys": 3}, "the nearest is tries"),
        ({"interval": "often"}, "interval"),
        ({"interval": 0}, "interval"),
    ):
        with pytest.raises(LabError, match=said):
            applied(node, {"settings": settings})
        assert (node.read(SETTINGS), node.read(DROP_IN)) == before
    assert timer_states(node) == ["active", "enabled"]


def test_without_the_timer(node: Node) -> None:
    applied(node, {"timer": False})
    assert timer_states(node) == ["inactive", "disabled"]
    assert not node.path(DROP_IN).exists()
    assert applied(node, {"timer": False}) == {}
    applied(node, None)
    assert timer_states(node) == ["active", "enabled"]


@pytest.mark.parametrize("test", [False, True])
def test_it_needs_instances(node: Node, test: bool) -> None:
    with pytest.raises(LabError, match="brine-watcher, which this node has or is to have, needs"):
        applied(node, {"enabled": True}, test=test, instance={"enabled": False})
    assert timer_states(node) == ["active", "enabled"]


def test_a_node_that_is_to_have_none_loses_it_and_no_more(node: Node) -> None:
    applied(node, {"settings": {"interval": 60}})
    node.run(["brine", "watcher", "pause", "1h"])
    applied(node, {"enabled": False})
    assert node.shell("find /usr /etc/brine -xdev -name '*watcher*'") == ""
    assert node.path("/usr/lib/systemd/system/brine-instance@.service").exists()
    assert applied(node, {"enabled": False}) == {}
    # It is removed, and not purged.
    applied(node, None)
    assert "paused until" in node.run(["brine", "watcher", "status"]).stdout
    node.run(["brine", "watcher", "resume"])


def test_it_goes_with_the_package_that_it_needs(node: Node) -> None:
    applied(node, None)
    applied(node, None, instance={"enabled": False})
    assert node.shell("find /usr -xdev -name '*watcher*'") == ""
    assert node.path("/usr/bin/brine").exists()
    assert applied(node, None, instance={"enabled": False}) == {}


def test_clean_undoes_it(node: Node) -> None:
    applied(node, {"settings": {"interval": 60}})
    apply_state(node, "brine.clean")
    assert all(not one.changes for one in apply_state(node, "brine.clean"))
    left = node.shell("find /etc /usr /run -xdev -name '*brine*' -not -name '*brine-lab*'")
    assert left == ""
