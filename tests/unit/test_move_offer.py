"""What an instance offers of itself is what moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.common.operation import AnswerState
from brine.instance import store
from brine.instance.observe import look
from brine.moves import records, source_service
from brine.moves.offer import state_of
from brine.moves.records import AskedStep

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
