"""The Salt states and modules on each series of Salt that they are for.

All other tests have the newest one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lab.errors import LabError
from lab.node import Node, boot_node
from lab.repository import publish
from lab.salt import STATES, apply_state, give_states
from lab.salt_series import RELEASE, use_salt
from lab.wheels import OLDER_SALTS
from node.instance_on_node import IDLE, info
from node.salt_on_node import loaded, of_the_tree

OUTBOX = "/var/lib/brine/outbox"
EVENT = {
    "id": "01700000000000000000-0123abcd",
    "time": 1700000000,
    "kind": "admin-state",
    "instance": "0f7f9bd0-1a0c-4a92-9d1e-5f6c1c0a3c4e",
    "name": "web1",
    "data": {"admin_state": "down"},
}
# What the beacon has to tell, as a minion would ask it.
BEACON = """
import json, salt.config, salt.loader
opts = salt.config.minion_config("/etc/salt/minion")
beacons = salt.loader.beacons(opts, salt.loader.minion_mods(opts))
assert beacons["brine.validate"]([]) == (True, "valid")
print(json.dumps(beacons["brine.beacon"]([])))
"""
NIC = {"link": "br0"}
WEB1 = {"accel": "tcg", "memory_mib": 64, "admin_state": "up", "nics": [NIC], **IDLE}


@pytest.fixture(scope="module")
def node(packages: list[Path]) -> Iterator[Node]:
    """A node that knows where the packages are, and has none."""
    with boot_node(RELEASE) as node:
        publish(node, packages)
        node.shell("ip link add br0 type bridge; ip link set br0 up")
        yield node


NEWEST = pytest.param("", id="newest", marks=pytest.mark.long)


@pytest.fixture(scope="module", params=[*OLDER_SALTS, NEWEST])
def home(node: Node, request: pytest.FixtureRequest) -> str:
    """The folder of a Salt, which the node has now."""
    return use_salt(node, request.param)


def changes(
    node: Node, instances: Mapping[str, Any], state: str = "brine", *, test: bool = False
) -> dict[str, Mapping[str, Any]]:
    """Apply a state with these instances in pillar, and return what it changed, or would."""
    give_states(node, {"brine": {"instance": {"instances": instances}}})
    results = apply_state(node, state, test=test)
    return {one.name: one.changes for one in results if one.result is None or one.changes}


def test_test_mode_on_a_bare_node_changes_nothing(node: Node, home: str) -> None:
    assert "web1" in changes(node, {"web1": WEB1}, test=True)
    assert not node.path("/usr/bin/brine").exists()
    assert not node.path("/etc/brine").exists()


def test_a_mistake_in_pillar_is_refused_in_a_line(node: Node, home: str) -> None:
    give_states(node, {"brine": {"kvmdd": {}}})
    with pytest.raises(LabError) as refused:
        apply_state(node)
    said = [line for line in str(refused.value).splitlines() if "requisite failed" not in line]
    (line,) = said[1:]
    assert line.endswith("brine:kvmdd: there is no such key; the nearest is kvmd")
    assert not node.path("/usr/bin/brine").exists()


def test_the_first_run_starts_an_instance_and_the_second_changes_nothing(
    node: Node, home: str
) -> None:
    done = changes(node, {"web1": WEB1})
    assert done["web1"]["web1"]["new"] == "running"
    assert info(node, "web1")["status"] == "running"
    assert changes(node, {"web1": WEB1}) == {}
    assert changes(node, {"web1": WEB1}, test=True) == {}


def test_the_loaders_have_all_functions_of_the_modules(node: Node, home: str) -> None:
    node.write("/etc/salt/master", json.dumps({"module_dirs": [STATES]}))
    assert loaded(node, "minion", home) | loaded(node, "master", home) == of_the_tree()


def test_a_nic_in_pillar_is_plugged_in_while_the_instance_runs(node: Node, home: str) -> None:
    before = info(node, "web1")["pid"]
    two = {**WEB1, "nics": [NIC, NIC]}
    for test in (True, False):
        done = changes(node, {"web1": two}, test=test)
        assert [one["kind"] for one in done["web1"]["attached"]] == ["nic"]
    assert changes(node, {"web1": two}) == {}
    assert info(node, "web1")["pid"] == before
    plugged = json.loads(node.run(["brine", "nic", "list", "web1", "--json"]).stdout)
    assert len(plugged) == 2


def test_a_minion_has_the_module_the_grain_and_the_beacon(node: Node, home: str) -> None:
    def said(*words: str) -> Any:
        call = ["salt-call", "--local", "--out=json", "--log-level=error", *words]
        return json.loads(node.run(call).stdout)["local"]

    assert {"brine.list", "brine.start"} <= set(said("sys.list_functions", "brine"))
    assert [one["name"] for one in said("brine.list")] == ["web1"]
    grain = said("grains.get", "brine")
    assert grain["version"] == node.run(["brine", "--version"]).stdout.split()[1]
    assert {"instance", "kvmd", "hotplug", "watcher"} <= set(grain["parts"])

    node.write(f"{OUTBOX}/{EVENT['id']}.json", json.dumps(EVENT))
    (told,) = json.loads(node.run([f"{home}/bin/python", "-c", BEACON]).stdout)
    assert [one["id"] for one in told["outbox"]] == [EVENT["id"]]
    node.path(f"{OUTBOX}/{EVENT['id']}.json").unlink()


def test_clean_undoes_all(node: Node, home: str) -> None:
    with pytest.raises(LabError, match="nothing is removed, as instances run: web1"):
        changes(node, {}, "brine.clean")
    node.run(["brine", "instance", "stop", "--force", "web1"])
    assert changes(node, {}, "brine.clean")
    assert changes(node, {}, "brine.clean") == {}
    assert node.run(["dpkg-query", "--list", "brine-*"], check=False).returncode == 1
    # What instances should be stays; the next Salt begins without it.
    node.shell("rm -r /var/lib/brine")
