import json
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brine.hotplug.net.records import Entry, TapState
from brine.instance import usage_commands
from brine.instance.usage import Usage
from brine.storage import commands as storage_commands
from brine.vm.unit_name import unit_of
from lab.scripted_systemctl import ScriptedSystemctl

Run = Callable[..., tuple[int, str, str]]

MIB = 1 << 20


@pytest.fixture
def node(
    brine: Run, own_node: Path, systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """A node where web1, which is this process, runs; db1 should, and off1 should not."""
    for name, state in (("web1", "up"), ("db1", "up"), ("off1", "down")):
        spec = {"name": name, "memory_mib": 512, "vcpus": 2, "admin_state": state}
        assert brine("define", "-", stdin=spec)[0] == 0
    pid = str(os.getpid())
    systemctl.unit(unit_of("web1"), ActiveState="active", MainPID=pid, InvocationID="a" * 32)
    monkeypatch.setattr(storage_commands, "VOLUME_TYPES", ())
    monkeypatch.setattr(usage_commands, "list_taps", list)
    return brine


def test_what_a_node_has_and_has_promised(node: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert usage_commands.node_info(Namespace(json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    # An instance that should be up counts, whether it runs or not.
    assert found["memory"]["promised"] == 2 * 512 * MIB
    assert found["cpus"] == {"total": os.cpu_count(), "promised": 4}
    assert found["instances"] == {"ADMIN_down": 1, "ERROR_down": 1, "running": 1}
    assert 0 < found["memory"]["available"] <= found["memory"]["total"]
    assert found["memory"]["used_by_instances"] > MIB
    assert usage_commands.node_info(Namespace(json=False)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["Node", "Memory", "CPUs", "Instances"]
    assert "promised 1.0G" in lines[1]


def test_a_spec_that_can_not_be_used_is_told(
    node: Run, own_node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_node / "instances/bad1.json").write_text("{")
    assert usage_commands.node_info(Namespace(json=True)) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["cpus"]["promised"] == 4
    assert "bad1" in said.err


def test_rates_are_by_the_time_between_two_looks() -> None:
    def sample(cpu_s: float, *counts: Any) -> usage_commands._Sample:
        return usage_commands._Sample(Usage(7 * MIB, cpu_s), *counts)

    before = {
        "idle": sample(5, 0, 0, 0, 0),
        "busy": sample(1, 100, 0, 10, 0),
        "gone": sample(1, 0, 0, 0, 0),
        "xen1": sample(1, None, None, 0, 0),
    }
    now = {
        "idle": sample(5, 0, 0, 0, 0),
        "busy": sample(4, 300, 50, 10, 4),
        "new": sample(1, 0, 0, 0, 0),
        "xen1": sample(0.5, None, None, 0, 0),  # it was started anew meanwhile
    }
    rows = list(usage_commands._rates(before, now, 2.0))
    assert [row["name"] for row in rows] == ["busy", "idle", "xen1"]
    assert rows[0] == {
        "name": "busy",
        "cpu_percent": 150.0,
        "memory_bytes": 7 * MIB,
        "read_bytes_per_second": 100,
        "written_bytes_per_second": 25,
        "received_bytes_per_second": 0,
        "sent_bytes_per_second": 2,
    }
    assert rows[2]["cpu_percent"] == 0
    assert rows[2]["read_bytes_per_second"] is None


def test_what_uses_the_most_is_shown_once_where_no_terminal_is(
    node: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tap = Entry("lo", "web1", "", TapState.OPEN, None, None, None, [], None, None, None, [])
    monkeypatch.setattr(usage_commands, "list_taps", lambda: [tap])
    assert usage_commands.top(Namespace(json=False, interval=0.05)) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["NAME", "CPU", "MEMORY", "READ", "WRITTEN", "RECEIVED", "SENT"]
    assert row.startswith("web1 ")
    assert row.count("/s") == 4
    assert usage_commands.top(Namespace(json=True, interval=0.05)) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["name"] == "web1"
    assert found["memory_bytes"] > MIB
