"""``brine metrics``: valid OpenMetrics of what a node's parts know, whatever their files have."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli, figures, metrics, outbox, paths
from brine.common.entry_points import EntryPoint
from brine.common.errors import BrineError
from brine.common.metrics import Collected, counter, exposition, gauge, summary
from brine.storage import commands as storage_commands
from brine.vm import markers
from brine.vm.markers import MarkerKind
from brine.vm.unit_name import unit_of
from brine.watcher import metrics as watcher_metrics
from brine.watcher import pass_figures, restart_counter, volume_watch
from brine.watcher.decide import Action, Decision
from brine.watcher.pass_figures import PassResult, note_pass
from brine.watcher.passes import PassOutcome
from brine.watcher.restart_counter import Tries
from brine.watcher.volume_watch import VolumeFault, Watched
from lab.scripted_systemctl import ScriptedSystemctl
from lab.tree import TREE
from tree_entry_points import of_tree
from unit.test_watcher_command import CRASHED

# The distribution's build has no need of these.
openmetrics = pytest.importorskip("prometheus_client.openmetrics.parser")
older_format = pytest.importorskip("prometheus_client.parser")

Run = Callable[..., tuple[int, str, str]]
Key = tuple[str, frozenset[tuple[str, str]]]


def values(text: str) -> dict[Key, float]:
    """The samples of a text that is valid, by name and labels."""
    found: dict[Key, float] = {}
    for family in openmetrics.text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    # node_exporter reads the older format, in which a comment is a comment.
    older = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in older_format.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert older == found
    return found


def key(metric: str, **labels: str) -> Key:
    return f"brine_{metric}", frozenset(labels.items())


@pytest.fixture
def node(brine: Run, own_node: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``brine``, with all parts installed that a node has."""
    monkeypatch.setattr(metrics, "entry_points", of_tree)
    known = {
        "brine.commands": [
            EntryPoint("instance", "brine.instance.cli:COMMAND"),
            EntryPoint("metrics", "brine.common.cli:METRICS"),
        ]
    }
    monkeypatch.setattr(cli, "entry_points", lambda group: known.get(group, []))
    for name in ("KVMD_DIR", "CONFD_DIR", "MOVES_DIR"):
        (own_node / name).mkdir()
        monkeypatch.setattr(paths, name, own_node / name)
    for module in pass_figures, watcher_metrics:
        monkeypatch.setattr(module, "FILE", own_node / "watcher-figures")
    monkeypatch.setattr(storage_commands, "VOLUME_TYPES", ())
    return brine


def test_the_text_is_valid_whatever_labels_and_values_are(tmp_path: Path) -> None:
    hostile = 'a"b\\c\nd{}=,\t\0\N{SNOWMAN}' + os.fsdecode(b"\xff")
    text = exposition(
        [
            Collected("a", (gauge("one", 'A "quoted"\nhelp\\.', [({"instance": hostile}, 1.5)]),)),
            Collected("b", (counter("two", "Two.", 1 << 60), summary("three", "3.", 2, 0.25))),
            Collected("c", (gauge("none", "Nothing.", []),), BrineError("broken")),
        ]
    )
    found = values(text)
    told = 'a"b\\c\nd{}=,\t\0\N{SNOWMAN}\N{REPLACEMENT CHARACTER}'
    assert found[key("one", instance=told)] == 1.5
    assert found[key("two_total")] == float(1 << 60)
    assert found[key("three_count")] == 2
    assert found[key("collector_success", part="b")] == 1
    assert found[key("collector_success", part="c")] == 0
    assert "none" not in text
    assert text.endswith("# EOF\n")


def test_instances_are_told_by_status_reason_and_promise(
    node: Run, systemctl: ScriptedSystemctl
) -> None:
    for name, admin_state in (("web1", "up"), ("web2", "up"), ("web3", "down")):
        spec = {"name": name, "admin_state": admin_state, "memory_mib": 512, "vcpus": 2}
        assert node("define", "-", stdin=spec)[0] == 0
    run = "a" * 32
    systemctl.unit(
        unit_of("web1"), ActiveState="active", MainPID=str(os.getpid()), InvocationID=run
    )
    systemctl.unit(unit_of("web2"), ActiveState="failed", Result="signal", InvocationID="b" * 32)
    (paths.SPECS_DIR / "web9.json").write_text('{"name": "web9", "memory')
    facts: dict[str, Any] = {
        "state": "io-error",
        "reason": "No space left on device",
        "no_space": True,
    }
    markers.write_marker(MarkerKind.START, "web1", run=run)
    markers.write_marker(MarkerKind.HALTED, "web1", run=run, **facts)
    status, text, err = node(noun="metrics")
    found = values(text)
    assert (status, err) == (0, "")
    assert found[key("instances", status="ERROR_halted")] == 1
    assert found[key("instances", status="ERROR_down")] == 1
    assert found[key("instances", status="running")] == 0
    assert found[key("instances_unusable")] == 1
    assert found[key("instances_halted", state="io-error")] == 1
    told = key("instance_status", name="web1", status="ERROR_halted", reason="io-error")
    assert found[told] == 1
    assert found[key("instances_by_reason", status="ERROR_down", reason="crash")] == 1
    assert found[key("instance_memory_promised_bytes", name="web1")] == 512 << 20
    assert key("instance_memory_promised_bytes", name="web3") not in found
    assert found[key("node_memory_promised_bytes")] == 1024 << 20
    assert found[key("node_vcpus_promised")] == 4
    assert found[key("node_memory_bytes")] > found[key("node_memory_available_bytes")] > 0


def test_daemons_are_told_while_they_run_and_their_counts_also_later(node: Run) -> None:
    kvmd = {
        "watched": 3,
        "waiting": 1,
        "out_of_reach": 2,
        "lag_s": 0.25,
        "verdicts": [["crash", "eof", 4], ["user", "guest-shutdown", 1]],
        "delays": 5,
        "delay_s": 0.5,
        "halts": [["io-error", "nospace", 1]],
    }
    figures.write_figures(paths.KVMD_DIR / figures.FILE_NAME, kvmd)
    confd = {"serial": 17, "answered": 400, "refused": [["too old", 2]], "keys": 1}
    figures.write_figures(paths.CONFD_DIR / figures.FILE_NAME, confd)
    found = values(node(noun="metrics")[1])
    assert found[key("kvmd_up")] == 1
    assert found[key("kvmd_watched")] == 3
    assert found[key("kvmd_out_of_reach")] == 2
    assert found[key("kvmd_lag_seconds")] == 0.25
    assert found[key("verdicts_total", verdict="crash", cause="eof")] == 4
    assert found[key("verdict_delay_seconds_sum")] == 0.5
    assert found[key("halts_total", state="io-error", reason="nospace")] == 1
    assert found[key("confd_serial")] == 17
    assert found[key("confd_queries_total")] == 400
    assert found[key("confd_refusals_total", reason="too old")] == 2
    file = paths.KVMD_DIR / figures.FILE_NAME
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "started": "1"}))  # that process has ended
    found = values(node(noun="metrics")[1])
    assert found[key("kvmd_up")] == 0
    assert key("kvmd_watched") not in found
    assert found[key("verdicts_total", verdict="crash", cause="eof")] == 4


def test_a_part_that_is_not_installed_is_absent(node: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [EntryPoint("common", "brine.common.pending_metrics:pending_metrics")]
    monkeypatch.setattr(metrics, "entry_points", lambda _group: alone)
    found = values(node(noun="metrics")[1])
    assert key("outbox_age_seconds") in found
    assert {name for name, _ in found if "kvmd" in name or "instance" in name} == set()


def test_the_outbox_and_operations_are_told_by_age(node: Run) -> None:
    outbox.put("admin-state", instance="u1", name="web1", data={"admin_state": "down"})
    (event,) = outbox.events()
    found = values(node(noun="metrics")[1])
    assert found[key("outbox_events")] == 1
    assert 0 <= found[key("outbox_age_seconds")] <= time.time() - event.time + 1
    assert found[key("operations_pending")] == 0


def test_the_watcher_tells_tries_passes_and_faults_of_volumes(node: Run) -> None:
    assert node("define", "-", stdin={"name": "web1", "admin_state": "down"})[0] == 0
    with restart_counter.changed() as record:
        record["web1"] = Tries(5, time.time(), given_up=True)
    outcome = PassOutcome(Decision(), CRASHED, (Action.TRY,))
    for names in (["web1"], None):
        note_pass([outcome], PassResult.OK, took_s=1.5, names=names)
    volume_watch.FILE.write_text(
        json.dumps({"faults": [[*Watched("vg0", "d1"), VolumeFault.DEGRADED]]})
    )
    found = values(node(noun="metrics")[1])
    assert found[key("restarts_total", name="web1", result="done")] == 2
    assert found[key("watcher_passes_total", result="ok")] == 2
    assert found[key("watcher_last_pass_duration_seconds")] == 1.5
    assert abs(found[key("watcher_last_pass_timestamp_seconds")] - time.time()) < 3600
    assert found[key("watcher_tries", name="web1")] == 5
    assert found[key("instance_given_up", name="web1")] == 1
    assert found[key("volume_faults", fault="degraded")] == 1
    about = {"name": "", "unit": "vg0", "disk": "d1", "snapshot": "", "fault": "degraded"}
    assert found[key("volume_fault", **about)] == 1
    note_pass([], PassResult.ODD, took_s=0.1, names=["web2"])
    found = values(node(noun="metrics")[1])
    assert key("restarts_total", name="web1", result="done") not in found


def test_the_manual_has_each_metric(node: Run, systemctl: ScriptedSystemctl) -> None:
    assert node("define", "-", stdin={"name": "web1"})[0] == 0
    systemctl.unit(unit_of("web1"), ActiveState="active", MainPID=str(os.getpid()))
    note_pass([PassOutcome(Decision(), CRASHED, (Action.TRY,))], PassResult.OK, took_s=1, names=[])
    every = {"watched": 1, "verdicts": [["a", "b", 1]], "halts": [["a", "b", 1]]}
    figures.write_figures(paths.KVMD_DIR / figures.FILE_NAME, every)
    every = {"serial": 1, "refused": [["a", 1]]}
    figures.write_figures(paths.CONFD_DIR / figures.FILE_NAME, every)
    manual = (TREE / "docs/man/brine-metrics.1.rst").read_text()
    told = set(re.findall(r"\bbrine_\w+", manual))
    names = {name for name, _ in values(node(noun="metrics")[1])}
    assert len(names) > 50
    assert names <= told


_HALF = '{"version": 1, "pid": 17, "fig'
_WRONG = (
    _HALF,
    "[]",
    "\0",
    '{"version": 2, "figures": {}}',
    '{"version": 1, "figures": {}, "pid": "x", "written": 0}',
)


@pytest.mark.parametrize("content", _WRONG)
def test_a_damaged_file_costs_its_own_figures_alone(node: Run, content: str) -> None:
    (paths.KVMD_DIR / figures.FILE_NAME).write_text(content)
    status, text, err = node(noun="metrics")
    found = values(text)
    assert status == 1
    assert found[key("collector_success", part="kvmd")] == 0
    assert found[key("collector_success", part="watcher")] == 1
    assert found[key("confd_up")] == 0
    assert len([line for line in err.splitlines() if "error" in line]) == 1
    assert "kvmd" in err


def test_figures_of_another_shape_are_left_out(node: Run) -> None:
    odd: dict[str, Any] = {"watched": "many", "verdicts": [["a", "b"], 7, ["c", "d", None]]}
    figures.write_figures(paths.KVMD_DIR / figures.FILE_NAME, {**odd, "halts": {}})
    found = values(node(noun="metrics")[1])
    assert found[key("kvmd_watched")] == 0
    assert found[key("verdicts_total", verdict="c", cause="d")] == 0


def test_a_peer_can_not_have_kinds_without_end() -> None:
    counts = figures.Figures({}, True, 0.0).counts("any", 2)
    for number in range(10_000):
        figures.count_kind(counts, ("crash", f"cause {number}"))
    assert len(counts) == figures.MOST_KINDS + 1
    assert sum(counts.values()) == 10_000


# node_exporter's textfile.


@pytest.fixture
def folder(node: Run, own_node: Path) -> Path:
    """The folder of the settings."""
    found = own_node / "textfiles"
    (paths.ETC_DIR / "metrics.toml").write_text(f'textfile_dir = "{found}"\n')
    return found


def test_the_textfile_is_written_where_the_folder_exists(node: Run, folder: Path) -> None:
    status, out, _ = node("--textfile", noun="metrics")
    assert (status, out.partition(":")[0]) == (0, "unchanged")
    folder.mkdir()
    status, out, _ = node("--textfile", noun="metrics")
    file = folder / "brine.prom"
    assert (status, out) == (0, f"written: {file}\n")
    assert key("kvmd_up") in values(file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert os.listdir(folder) == ["brine.prom"]


def test_a_textfile_that_is_off_or_has_no_folder_is_not_written(node: Run, folder: Path) -> None:
    settings = paths.ETC_DIR / "metrics.toml"
    settings.write_text(f'textfile = "on"\n{settings.read_text()}')
    status, _, err = node("--textfile", noun="metrics")
    assert status == 1
    assert str(folder) in err
    folder.mkdir()
    settings.write_text('textfile = "off"\n')
    assert node("--textfile", noun="metrics")[0] == 0
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    "text", ["textfiles = 1", 'textfile = "maybe"', 'textfile_dir = "here"', "textfile = ["]
)
def test_wrong_settings_are_named(node: Run, text: str) -> None:
    (paths.ETC_DIR / "metrics.toml").write_text(text)
    status, _, err = node("--textfile", noun="metrics")
    assert status == 1
    assert "metrics.toml" in err
    assert len(err.splitlines()) <= 2


def test_a_textfile_that_can_not_be_written_leaves_the_one_before(
    node: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    node("--textfile", noun="metrics")
    before = (folder / "brine.prom").read_text()

    def full(*_: object, **_and: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", full)
        status, _, err = node("--textfile", noun="metrics")
    assert status == 1
    assert "No space left" in err
    assert (folder / "brine.prom").read_text() == before
    assert os.listdir(folder) == ["brine.prom"]
