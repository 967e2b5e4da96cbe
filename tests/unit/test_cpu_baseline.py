"""The processor that all nodes of a group have. The nodes' answers are those of QEMU 7.2 and 10.0
on one host; what further nodes lack is taken from these."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli
from brine.common.entry_points import EntryPoint

ANSWERS = Path(__file__).parent / "processors"
SKYLAKE, ICELAKE = "Skylake-Server-v4", "Icelake-Server-v5"


def answer(name: str = "kvm-7.2") -> dict[str, Any]:
    """What ``brine node cpu --json`` has printed."""
    found: dict[str, Any] = json.loads((ANSWERS / f"{name}.json").read_text())
    return found


def node(model: str, *, qemu: str = "7.2", but: str = "", more: str = "") -> dict[str, Any]:
    """The answer of a node whose processor is exactly that model of QEMU's, with other flags."""
    data = answer(f"kvm-{qemu}")
    flags = {*data["models"][model]["flags"], *more.split()} - {*but.split()}
    return {**data, "flags": sorted(flags)}


@pytest.fixture
def baseline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs ``brine config cpu-baseline - --json``; returns what it printed."""
    entries = {
        "brine.commands": [EntryPoint("config", "brine.config.cli:COMMAND")],
        "brine.verbs": [EntryPoint("config", "brine.cluster.cli:add_config_verbs")],
    }
    monkeypatch.setattr(cli, "entry_points", lambda group: entries.get(group, []))

    def run(nodes: Any, *, as_json: bool = True) -> Any:
        data = nodes if isinstance(nodes, bytes) else json.dumps(nodes).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert cli.main(["config", "cpu-baseline", "-", *["--json"] * as_json]) == 0
        said = capsys.readouterr().out
        return json.loads(said) if as_json else said

    return run


def test_a_group_of_like_nodes_has_the_model_of_all(baseline: Any) -> None:
    found = baseline({"n1": node(SKYLAKE), "n2": node(SKYLAKE)})
    assert found["cpu_type"] == SKYLAKE
    assert found["declaration"] == {"cluster": {"hvparams": {"kvm": {"cpu_type": SKYLAKE}}}}
    assert (found["removed"], found["added"], found["lacking"]) == ([], [], {})
    assert "avx512f" in found["flags"]


def test_the_oldest_node_decides(baseline: Any) -> None:
    """And the newer ones are told by what they have in vain."""
    found = baseline({"old": node(SKYLAKE), "new": node(ICELAKE), "newest": node(ICELAKE)})
    assert found["cpu_type"] == SKYLAKE
    assert "avx512vnni" in found["lacking"]["old"]
    assert {"new", "newest"}.isdisjoint(found["lacking"])


def test_what_one_node_lacks_is_removed_and_what_all_have_is_added(baseline: Any) -> None:
    found = baseline(
        {
            "n1": node(SKYLAKE, more="md-clear ssbd stibp"),
            "n2": node(SKYLAKE, but="pku", more="ssbd md-clear"),
        }
    )
    assert found["cpu_type"] == f"{SKYLAKE},-pku,+md-clear,+ssbd"
    assert found["lacking"] == {"n2": ["pku", "stibp"]}
    assert {"md-clear", "ssbd"} <= {*found["flags"]}
    assert {"pku", "stibp"}.isdisjoint(found["flags"])


@pytest.mark.parametrize("accel", ["kvm", "tcg"])
def test_two_versions_of_qemu_have_the_flags_that_both_know(baseline: Any, accel: str) -> None:
    """One and the same host: what QEMU 10.0 tells guests of it, 7.2 does not know by name."""
    old, new = answer(f"{accel}-7.2"), answer(f"{accel}-10.0")
    found = baseline({"bookworm": old, "trixie": new})
    common = {*old["flags"]} & {*new["flags"]}
    assert {*found["flags"]} == common - {*found["nested"]}
    changed = {one[1:] for one in found["cpu_type"].split(",")[1:]}
    for each in (old, new):
        known = {*each["flags"]}.union(*(one["flags"] for one in each["models"].values()))
        assert changed <= known, "its QEMU would refuse to start"


def test_a_model_that_only_one_qemu_has_is_not_taken(baseline: Any) -> None:
    newest = "Icelake-Server-v7"
    old, new = node(ICELAKE), node(newest, qemu="10.0")
    assert newest not in old["models"]
    found = baseline({"bookworm": old, "trixie": new})
    assert found["model"] in old["models"]
    assert {*found["flags"]} == {*old["flags"]} & {*new["flags"]}


def test_a_flag_that_one_qemu_does_not_know_is_not_removed(baseline: Any) -> None:
    """The model has it in another version of QEMU only: no cpu_type would do on both."""
    old, new = node(SKYLAKE), node(SKYLAKE, qemu="10.0")
    new["models"][SKYLAKE]["flags"].append("only-there")
    found = baseline({"bookworm": old, "trixie": new})
    assert "only-there" not in found["cpu_type"]
    assert found["model"] != SKYLAKE


def test_machines_in_guests_are_left_out(baseline: Any) -> None:
    nested = "vmx vmx-ept vmx-vpid svm npt"
    found = baseline({"n1": node(SKYLAKE, more=nested), "n2": node(SKYLAKE, more=nested)})
    assert found["cpu_type"] == SKYLAKE
    assert found["nested"] == sorted(nested.split())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vendor": "AuthenticAMD"}, ("vendor", "AuthenticAMD on n2", "GenuineIntel on n1")),
        ({"accel": "tcg"}, ("accel", "kvm on n1", "tcg on n2")),
        ({"models": {}}, ("n1, n2",)),
        ({"flags": ["a,+b"]}, ("/n2/flags/0",)),
        ({"flags": "sse"}, ("/n2/flags",)),
        ({"vendor": None}, ("/n2/vendor",)),
        ({"models": {SKYLAKE: {"flags": ["-cpu x"]}}}, (f"/n2/models/{SKYLAKE}/flags/0",)),
    ],
)
def test_what_is_no_common_processor_is_refused(
    baseline: Any, capsys: pytest.CaptureFixture[str], change: Any, named: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as end:
        baseline({"n1": node(SKYLAKE), "n2": {**node(SKYLAKE), **change}})
    told = capsys.readouterr()
    assert end.value.code == 1
    assert told.out == ""
    assert told.err.startswith("brine: error: ")
    assert all(one in told.err for one in named)


@pytest.mark.parametrize("given", [b"", b"[]", b"{}", b'{"n1": 7}', b'{"n1": {}}', b"{"])
def test_what_is_no_answer_is_refused(
    baseline: Any, capsys: pytest.CaptureFixture[str], given: bytes
) -> None:
    with pytest.raises(SystemExit) as end:
        baseline(given)
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("brine: error: ")


def test_a_person_gets_lines(baseline: Any) -> None:
    said = baseline({"n1": node(SKYLAKE), "n2": node(SKYLAKE, but="pku")}, as_json=False)
    assert said.splitlines() == [f"cpu_type: {SKYLAKE},-pku", "n2 lacks, and so will guests: pku"]
