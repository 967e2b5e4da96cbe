"""What an instance offers of itself is what moves; and what of an offer a node refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.common.operation import AnswerState
from brine.instance import store
from brine.instance.node_facts import NodeFacts
from brine.instance.observe import look
from brine.instance.validate import completed
from brine.moves import records, source_service, target_service
from brine.moves.offer import state_of
from brine.moves.records import AskedStep
from brine.vm.spec import to_json

SPEC = {"name": "web1", "memory_mib": 128}


@pytest.mark.parametrize("changed", [{}, {"memory_mib": 256}])
def test_what_has_changed_since_it_was_offered_does_not_move(
    brine: Callable[..., Any], own_node: Path, monkeypatch: pytest.MonkeyPatch, changed: Any
) -> None:
    for name in ("MOVES_DIR", "MOVES_STATUS_DIR", "CLAIMS_DIR"):
        monkeypatch.setattr(paths, name, own_node / name)
    assert brine("define", "-", stdin=SPEC)[0] == 0
    facts = {"instance": "web1", "uuid": store.load("web1").uuid, "serial": 2, "target": "n2"}
    facts |= {"is_live": False, "copies": False, "runs": False, "run": "unknown"}
    facts |= {"state": state_of(look("web1"))}
    assert brine("define", "-", stdin=SPEC | changed)[0] == 0
    answer = source_service.answer(AskedStep("0176-0", "stop", facts))
    assert answer.state is (AnswerState.FAILED if changed else AnswerState.RUNNING), answer
    assert (records.find("web1") is None) == bool(changed)


def offered(**keys: Any) -> dict[str, Any]:
    """The offer of an instance that is off."""
    node = NodeFacts(
        node="n1", version="", memory_mib=1, memory_available_mib=1, links={}, units={}
    )
    return {
        "spec": to_json(completed(SPEC | keys)),
        "node": json.loads(json.dumps(node.to_json())),
        "live": False,
        "runs": False,
        "disks": [],
        "bitmaps": {},
        **dict.fromkeys(("runtime", "uefi_vars", "console_log", "vnc_password")),
    }


def test_a_move_to_another_node_is_not_prepared(
    own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOVES_DIR", "MOVES_STATUS_DIR", "CLAIMS_DIR"):
        monkeypatch.setattr(paths, name, own_node / name)
    offer = offered()
    facts = {"instance": "web1", "uuid": offer["spec"]["uuid"], "serial": 2, "offered": offer}
    facts |= {"source": "n1", "target": "n9"}
    answer = target_service.answer(AskedStep("0176-0", "prepare", facts))
    assert answer.state is AnswerState.FAILED
    assert "n9, which is not this node" in answer.error
    assert records.find("web1") is None
