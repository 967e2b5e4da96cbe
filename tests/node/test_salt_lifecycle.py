"""The Salt states of the lifecycle handler, and owners in pillar."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest

from lab.errors import LabError
from lab.node import Node
from lab.salt import StateResult, apply_state, give_states

PATH, FENCE = "brine-lifecycle.path", "brine-lifecycle-fence.service"
SETTINGS = "/etc/brine/lifecycle.toml"
OWNED = {"instances": {"ci1": {"accel": "tcg", "owner": {"watchdog_timeout": 30}}}}


def applied(
    node: Node, lifecycle: Mapping[str, Any] | None, instance: Mapping[str, Any] = OWNED
) -> dict[str, StateResult]:
    """Apply another pillar, and return what was changed, by name."""
    give_states(node, {"brine": {"instance": instance, "lifecycle": lifecycle}})
    return {one.name: one for one in apply_state(node) if one.changes}


def states(node: Node, unit: str) -> list[str]:
    """Whether a unit is active, and whether it is enabled."""
    asked = [["systemctl", verb, unit] for verb in ("is-active", "is-enabled")]
    return [node.run(one, check=False).stdout.strip() for one in asked]


def test_an_owner_in_pillar_brings_the_handler_and_the_second_run_changes_nothing(
    node: Node,
) -> None:
    applied(node, None)
    assert states(node, PATH) == ["active", "enabled"]
    assert states(node, FENCE) == ["inactive", "disabled"]
    spec = json.loads(node.read("/var/lib/brine/instances/ci1.json"))
    assert spec["owner"]["watchdog_timeout"] == 30
    assert node.path("/run/brine/lifecycle/ci1").is_dir()
    assert applied(node, None) == {}


def test_the_fence_and_its_settings(node: Node) -> None:
    pillar = {"fence": True, "settings": {"fence_after_s": 30}}
    applied(node, pillar)
    assert states(node, FENCE) == ["active", "enabled"]
    assert tomllib.loads(node.read(SETTINGS)) == pillar["settings"]
    assert applied(node, pillar) == {}
    with pytest.raises(LabError, match="the nearest is fence_after_s"):
        applied(node, {"settings": {"fence_after": 30}})
    assert tomllib.loads(node.read(SETTINGS)) == pillar["settings"]
    applied(node, None)
    assert states(node, FENCE) == ["inactive", "disabled"]
    assert not node.path(SETTINGS).exists()


def test_a_node_that_is_to_have_none_loses_it_and_no_more(node: Node) -> None:
    applied(node, {"enabled": False})
    assert node.shell("find /usr /etc/brine -xdev -name '*lifecycle*' -not -path '*/salt/*'") == ""
    assert node.path("/usr/lib/systemd/system/brine-instance@.service").exists()
    assert applied(node, {"enabled": False}) == {}
