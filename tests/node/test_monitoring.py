"""What tells of a node: its metrics, with alerts and panels on them, programs for events, and
machinectl."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboard import RULES, expressions, metrics_in
from lab.debian import host_release
from lab.images import node_image
from lab.node import Node
from lab.peer_packages import archives
from lab.prometheus import prometheus
from lab.waiting import wait_for
from node.confd_on_node import CONFIG, KEY, KEY_FILE, declared
from node.instance_on_node import IDLE, boot_idle, define, wait_status
from node.watcher_on_node import kill, node_with_watcher, passed

TEXTFILES = Path("/var/lib/prometheus/node-exporter")
_MACHINED = ["systemd-container"]
_PARTS = ["brine-confd", "brine-moves"]


@pytest.fixture(scope="module")
def node(packages: list[Path]) -> Iterator[Node]:
    """A node that runs instances, with all parts that a node has, where machined can be had."""
    tree = node_image(host_release())
    # Fetched with this machine's own apt; a node has no way to a mirror.
    machined = archives(_MACHINED, tree / "var/lib/dpkg/status", tree.parent.name)
    with node_with_watcher(host_release(), [*packages, *machined]) as node:
        node.run(["apt-get", "install", "--yes", "--quiet=2", *_PARTS], timeout_s=300)
        yield node


def metrics(node: Node) -> list[dict[str, Any]]:
    """The figures, as JSON."""
    found: list[dict[str, Any]] = json.loads(
        node.run(["brine", "metrics", "--json"], check=False).stdout
    )
    return found


def value(node: Node, name: str, **labels: str) -> float | None:
    for one in metrics(node):
        if one["name"] == f"brine_{name}" and labels.items() <= one["labels"].items():
            return float(one["value"])
    return None


def test_a_real_prometheus_answers_all_queries_of_what_a_node_prints(
    node: Node, tmp_path: Path
) -> None:
    node.write(Path(KEY_FILE), KEY)
    node.run(["brine", "config", "apply", "-"], stdin=json.dumps(declared()))
    assert node.path(CONFIG).exists()
    node.run(["systemctl", "start", "brine-confd"])
    node.shell("mkdir -p /srv/disks && brine storage create file /srv/disks")
    boot_idle(node, "web1", admin_state="up")
    boot_idle(node, "web2", admin_state="up")
    define(node, "web3", admin_state="down")
    kill(node, "web2")
    passed(node)
    wait_status(node, "web2", "running")
    wait_for("the crash to be counted", lambda: value(node, "verdicts_total", verdict="crash"))
    wait_for("confd to tell its serial", lambda: value(node, "confd_serial"))
    node.shell("truncate --size=0 /run/brine-kvmd/figures")
    assert node.run(["brine", "metrics"], check=False).returncode == 1
    wait_for("a half-written file to be replaced", lambda: value(node, "kvmd_watched") == 2)
    node.run(["bash", "-c", "echo junk >/dev/udp/127.0.0.1/1814"])
    wait_for("confd to refuse junk", lambda: value(node, "confd_refusals_total"))
    text = node.run(["brine", "metrics"]).stdout
    with prometheus(text, tmp_path, [RULES]) as server:
        assert server.query('brine_instance_status{name="web1", status="running"}')
        assert server.query('brine_restarts_total{name="web2", result="done"} == 1')
        assert server.query('brine_instance_memory_used_bytes{name="web1"} > 1e6')
        assert server.query('brine_instance_cpu_seconds_total{name="web1"} > 0')
        printed = {one["metric"]["__name__"] for one in server.query('{__name__=~"brine_.*"}')}
        asked = metrics_in("\n".join(expressions()))
        assert asked - printed == set()
        for expression in expressions():
            server.query(expression)
        rare = {"brine_instance_given_up", "brine_volume_fault"}  # there without instances of it
        assert metrics_in(RULES.read_text()) - printed <= rare
        assert server.alerts() == set()


def test_the_timer_writes_where_node_exporter_reads(node: Node) -> None:
    def timer() -> str:
        return node.run(["systemctl", "is-active", "brine-metrics.timer"], check=False).stdout

    assert timer() == "inactive\n"
    node.run(["mkdir", "-p", TEXTFILES])
    wait_for("the timer to begin", lambda: timer() == "active\n")
    file = TEXTFILES / "brine.prom"
    wait_for("the file", node.path(file).exists, timeout_s=120)
    assert 'brine_instance_running{name="web1"} 1' in node.read(file)
    assert node.shell(f"stat -c '%a %U' {file}").split() == ["644", "root"]
    before = node.read(file)
    node.shell(f"mount -o bind,ro {TEXTFILES} {TEXTFILES}")
    try:
        assert node.run(["systemctl", "start", "brine-metrics"], check=False).returncode != 0
        said = [one["MESSAGE"] for one in node.journal("_SYSTEMD_UNIT=brine-metrics.service")]
        assert [one for one in said if "error" in one][-1].endswith("Read-only file system")
    finally:
        node.run(["umount", TEXTFILES])
    assert node.read(file) == before
    node.run(["systemctl", "start", "brine-metrics"])


# Programs of an operator's.

_PROGRAMS = Path("/etc/brine/events.d")
# No bomb: in the lab the kernel may count no tasks, and the limit of the user alone holds.
_FORKS = "#!/bin/sh\nfor each in $(seq 300); do sleep 1000 & done\nwait\n"


def put_program(node: Node, name: str, script: str, mode: str = "755") -> None:
    node.write(_PROGRAMS / name, script)
    node.run(["chmod", mode, _PROGRAMS / name])


def told(node: Node) -> list[dict[str, Any]]:
    """The events that the good program was told of."""
    said = node.journal("--unit=brine-event@good:*")
    units = [one for one in said if "brine-event@" in one.get("_SYSTEMD_UNIT", "")]
    assert all(one["_UID"] != "0" for one in units)
    return [json.loads(one["MESSAGE"]) for one in units]


def test_programs_are_told_of_a_crash_and_bad_ones_do_no_harm(node: Node) -> None:
    assert node.run(["systemctl", "is-active", "brine-events"], check=False).stdout == "inactive\n"
    drop_in = Path("/etc/systemd/system/brine-event@.service.d/short.conf")
    node.run(["mkdir", "-p", drop_in.parent])
    node.write(drop_in, "[Service]\nTimeoutStartSec=5s\n")
    node.run(["systemctl", "daemon-reload"])
    put_program(node, "good", "#!/bin/sh\nexec cat\n")
    wait_for("the follower to begin", lambda: _is_active(node, "brine-events"))
    assert node.run(["brine", "events", "test"]).stdout == "done: good\n"
    assert [one["event"] for one in told(node)] == ["test"]
    put_program(node, "hangs", "#!/bin/sh\ntrap '' TERM\nsleep 1000 & sleep 1000\n")
    put_program(node, "forks", _FORKS)
    put_program(node, "open", "#!/bin/sh\n", "777")
    put_program(node, "fails", "#!/bin/sh\nexit 3\n")
    assert node.run(["brine", "events", "list"], check=False).returncode == 1
    kill(node, "web1")
    found = wait_for("the crash to be told", lambda: told(node)[1:], timeout_s=120)
    assert (found[0]["event"], found[0]["instance"]) == ("crash", "web1")
    assert found[0]["facts"]["cause"] == "eof"

    def faults() -> dict[str, str]:
        records = node.journal("SYSLOG_IDENTIFIER=brine-events")
        return {
            Path(one["BRINE_PROGRAM"]).name: one["MESSAGE"]
            for one in records
            if "BRINE_PROGRAM" in one
        }

    wait_for("the faults", lambda: len(faults()) == 4, timeout_s=120)
    assert "60 s" in faults()["hangs"]
    assert "failed with status" in faults()["forks"]  # it could not fork any more
    assert "others" in faults()["open"]
    assert "status 3" in faults()["fails"]
    assert "brine-event@" not in node.run(["systemctl", "--failed", "--plain"]).stdout
    assert node.shell("pgrep -fx 'sleep 1000' || echo none") == "none\n"
    passed(node)
    kill(node, "web2")
    wait_for("the next crash", lambda: told(node)[2:], timeout_s=120)
    assert told(node)[2]["instance"] == "web2"
    assert _is_active(node, "brine-kvmd")


def _is_active(node: Node, unit: str) -> bool:
    return node.run(["systemctl", "is-active", unit], check=False).stdout == "active\n"


def test_machinectl_has_the_instances_that_run(node: Node) -> None:
    node.run(["apt-get", "install", "--yes", "--quiet=2", *_MACHINED], timeout_s=300)
    define(node, "db1", **IDLE)
    node.run(["brine", "instance", "start", "db1"])

    def listed() -> list[str]:
        rows = node.run(["machinectl", "list", "--no-legend", "--no-pager"]).stdout
        return [row.split()[0] for row in rows.splitlines()]

    wait_for("db1 to be listed", lambda: "db1" in listed(), timeout_s=60)
    status = node.run(["machinectl", "status", "--no-pager", "db1"]).stdout
    assert "brine-instance@db1.service" in status
    assert "class vm" in status
    node.run(["brine", "instance", "stop", "--force", "db1"])
    wait_for("db1 to be gone", lambda: "db1" not in listed(), timeout_s=60)
    # A machined that hangs keeps nobody waiting.
    node.run(["systemctl", "kill", "--signal=STOP", "systemd-machined"])
    try:
        node.run(["brine", "instance", "start", "db1"])
        node.run(["brine", "instance", "stop", "--force", "db1"])
    finally:
        node.run(["systemctl", "kill", "--signal=CONT", "systemd-machined"])
