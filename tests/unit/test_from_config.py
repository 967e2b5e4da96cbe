"""Instances out of the cluster's configuration, and those that are another node's by now."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brine.config.model import Configuration
from brine.config.store import ConfigStore
from brine.instance import store
from brine.instance.from_config import elsewhere, instances_of, spec_of
from brine.instance.validate import define
from lab.ganeti_config import ganeti_config, instance_name, node_name, uuid_of

HERE = node_name(1)
OURS, THEIRS = instance_name(1), instance_name(2)


@pytest.fixture
def configuration(own_node: Path) -> Configuration:
    """A cluster of three nodes, each with an instance, on the first of these nodes."""
    return Configuration.from_json(ganeti_config(nodes=3, instances=3))


def defined(name: str, **keys: Any) -> None:
    store.save(define({"name": name, **keys}))


def test_what_has_moved_is_told_by_its_uuid(configuration: Configuration) -> None:
    for instance in configuration.instances.values():
        store.save(define(spec_of(configuration, instance)[0]))
    defined("own")  # of this node only
    defined("renamed", uuid=uuid_of("instance", 3))
    store.remove(instance_name(3))
    (store.FOLDER / "damaged.json").write_text("{")
    assert elsewhere(configuration, HERE) == {THEIRS: node_name(2), "renamed": node_name(3)}
    assert [one.name for one in instances_of(configuration, HERE)] == [OURS]


@pytest.mark.parametrize("json_too", [False, True])
def test_define_names_them_and_leaves_them_alone(
    configuration: Configuration,
    brine: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    json_too: bool,
) -> None:
    monkeypatch.setattr(ConfigStore, "read", lambda _: configuration)
    defined(THEIRS, uuid=uuid_of("instance", 2))
    before = store.load(THEIRS)
    more = ["--json"] if json_too else []
    status, out, err = brine("define", "--from-config", "--node", HERE, *more)
    assert status == 0
    if json_too:
        told = json.loads(out)
        assert told["elsewhere"] == [{"name": THEIRS, "node": node_name(2)}]
        assert [one["name"] for one in told["instances"]] == [OURS]
    else:
        assert out == f"defined: {OURS}\n"
        warning, hint = err.splitlines()[-2:]
        assert warning.startswith(f"brine: warning: {THEIRS}: is defined here, and is ")
        assert f"{node_name(2)}'s" in warning
        assert hint.startswith(f"brine: hint: brine instance undefine {THEIRS}")
    assert store.load(THEIRS) == before
