"""The reports on instances, for people and programs."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths, process
from brine.common.tables import table
from brine.common.times import local_time
from brine.instance.listing import HEADING, WIDE_HEADING, row, summary
from brine.instance.observe import Observed
from brine.instance.report import details, report_lines
from brine.instance.unit import Active, Unit
from brine.instance.validate import completed
from brine.instance.xen import config
from brine.instance.xen.xl import Domain
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from brine.vm.halt import Halt, printable_excerpt
from brine.vm.markers import UNKNOWN_RUN, MarkerKind, read_marker, write_marker
from brine.vm.run import Run
from brine.vm.slots import pci_slot
from brine.vm.spec import to_json
from lab.fake_agent import Agent, agent
from lab.fake_qemu import FakeQemus, Refused
from lab.runtime_file import write_runtime_file
from unit.runs import marked_run, observed

A = "0a000000-0000-4000-8000-00000000000a"
BY_USER = "it should be up but was shut down by its user"

RUN = "0d" * 16


@pytest.fixture(autouse=True)
def node(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of its own."""
    monkeypatch.setattr(process, "runs_in", lambda *_: True)


def seen(unit: Unit | None = None, *, shut_down: bool = False, **keys: Any) -> Observed:
    spec = completed({"name": "web1", "uuid": A, "admin_state": "up", **keys})
    domain = Domain("web1", 7, 64, 1, "-b----") if unit and spec.is_xen() else None
    return observed(spec, unit, domain, marks=(MarkerKind.SHUTDOWN,) if shut_down else ())


def running(**others: Any) -> Unit:
    return Unit("web1", Active.ACTIVE, **{"main_pid": 4711, "invocation": "a", **others})


# The list


def test_a_row_has_a_cell_for_each_column() -> None:
    rows = [HEADING, row(seen(running(), vcpus=2, memory_mib=512)), row(seen(shut_down=True))]
    assert list(table(rows)) == [
        "NAME  STATUS     ADMIN STATE  OPER STATE  MEMORY    VCPUS  WHY",
        "web1  running    up           running     512 MiB   2      -",
        f"web1  USER_down  up           S           1024 MiB  1      {BY_USER}",
    ]


def test_a_program_is_told_the_same_in_json() -> None:
    one = seen(running(), memory_mib=512)
    told = json.loads(json.dumps(summary(one, "given up")))
    assert told == {
        "name": "web1",
        "uuid": A,
        "hypervisor": "kvm",
        "status": "running",
        "admin_state": "up",
        "admin_state_source": "admin",
        "oper_state": "running",
        "why": "",
        "paused": False,
        "halted": None,
        "restart_pending": None,
        "memory_mib": 512,
        "vcpus": 1,
        "pid": 4711,
        "since": None,
        "vnc": None,
        "domain": None,
        "node": os.uname().nodename,
        "volumes": [],
        "held_back": "given up",
        "spec": to_json(one.spec),
    }


@pytest.mark.parametrize(
    ("halt", "status", "still", "why"),
    [
        (
            Halt("io-error", "No space left on device", "disk-11111111-pci-5", no_space=True),
            "ERROR_halted",
            "io-error",
            "QEMU has stopped it: io-error, No space left on device, at /srv/full",
        ),
        (Halt("internal-error"), "ERROR_halted", "internal-error", "QEMU has stopped it: "),
        (Halt("suspended"), "running", "suspended", "its guest has suspended itself"),
        (Halt("paused"), "running", "paused", "another program has paused it"),
    ],
)
def test_a_list_says_which_qemu_stands_still_and_why(
    halt: Halt, status: str, still: str, why: str
) -> None:
    disk = {"path": "/srv/full", "uuid": "11111111-0000-4000-8000-000000000000"}
    one = replace(seen(running(), disks=[disk]), halted=halt._replace(since=60.0))
    cells = row(one)
    assert cells[1] == f"{status} ({still})"
    assert cells[-1].startswith(why)
    told = summary(one)
    assert (told["status"], told["oper_state"]) == (status, "running")
    assert told["paused"] == (still == "paused")
    assert told["halted"] == {
        "state": still,
        "reason": halt.reason or None,
        "device": halt.device or None,
        "no_space": halt.no_space,
        "since": "1970-01-01T00:01:00+00:00",
    }
    ended = replace(one, unit=None)
    assert summary(ended)["halted"] is None


def test_what_qemu_says_is_the_same_when_it_is_read_from_its_marker() -> None:
    halt = Halt("io-error", printable_excerpt("\x1b" * 80))
    write_marker(MarkerKind.HALTED, "web1", run=UNKNOWN_RUN, **halt.facts())
    found = Halt.of(read_marker(MarkerKind.HALTED, "web1"))
    assert found is not None
    assert (found.reason, found.reason.isprintable()) == (halt.reason, True)


def test_a_wide_list_says_since_when_and_where() -> None:
    one = seen(running(since_us=int((time.monotonic() - 60) * 1e6)))
    heading, cells = WIDE_HEADING, row(one, wide=True)
    told = dict(zip(heading, cells, strict=True))
    assert heading[-3:] == ("UP SINCE", "NODE", "WHY")
    since = summary(one)["since"]
    ago = datetime.now(UTC) - datetime.fromisoformat(since)
    assert timedelta(seconds=55) < ago < timedelta(seconds=80)
    assert since.endswith("+00:00")
    assert told["UP SINCE"] == local_time(datetime.fromisoformat(since).timestamp())
    assert told["NODE"] == os.uname().nodename
    assert row(seen(), wide=True)[-3] == "-"


# What waits for a restart


def plug(kind: str, device: dict[str, Any]) -> None:
    file = paths.RUNTIME_DIR / "web1.json"
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, kind: [*data[kind], device]}))


def test_what_differs_from_what_runs_waits_for_a_restart() -> None:
    write_runtime_file(seen(memory_mib=512).spec)
    one = seen(running(), memory_mib=1024, vcpus=2, nics=[{"link": "br0"}])
    told = summary(one)
    assert told["restart_pending"] == ["vcpus", "memory_mib", "nics"]
    assert (told["memory_mib"], told["vcpus"]) == (512, 1)
    memory, vcpus, why = row(one)[-3:]
    assert (memory, vcpus) == ("512 MiB", "1")
    assert why == "restart pending: vcpus, memory_mib, nics"
    lines = list(report_lines(details(one)))
    (line,) = [line for line in lines if line.startswith("Restart pending:")]
    assert line.split(":", 1)[1].strip() == "vcpus (1, then 2), memory_mib (512, then 1024), nics"


def test_what_takes_no_restart_is_not_pending() -> None:
    write_runtime_file(seen().spec)
    one = seen(running(), start_order=7, shutdown_timeout=9, user_shutdown="restart", tags=["a"])
    assert summary(one)["restart_pending"] == []
    assert not any(line.startswith("Restart") for line in report_lines(details(one)))


def test_what_was_plugged_is_not_pending() -> None:
    write_runtime_file(seen().spec)
    hot = Disk(uuid="0c000000-0000-4000-8000-00000000000c", path="/hot")
    plug("disks", hot.entry(1, pci_slot(20)))
    assert summary(seen(running()))["restart_pending"] == []
    # Nor is it once the spec has it, too.
    said = {"uuid": hot.uuid, "path": "/hot", "format": "raw"}
    assert summary(seen(running(), disks=[said]))["restart_pending"] == []
    other = {**said, "cache": "writeback"}
    assert summary(seen(running(), disks=[other]))["restart_pending"] == ["disks"]
    assert summary(seen(running(), disks=[{"path": "/b"}]))["restart_pending"] == ["disks"]


def test_a_domain_of_xens_waits_for_a_restart_too() -> None:
    keys: dict[str, Any] = {"hypervisor": "xen-pvh", "kernel": "/vmlinuz"}
    assert summary(seen(running(), **keys))["restart_pending"] is None
    config.write_config(seen(memory_mib=512, **keys).spec)
    told = summary(seen(running(), memory_mib=1024, nics=[{"link": "br0"}], **keys))
    assert (told["restart_pending"], told["memory_mib"]) == (["memory_mib", "nics"], 512)
    lines = list(report_lines(details(seen(running(), memory_mib=1024, **keys))))
    assert any(line.endswith(" memory_mib (512, then 1024)") for line in lines)


def test_who_may_not_read_what_runs_is_told_nothing_of_it() -> None:
    (paths.RUNTIME_DIR / "web1.json").mkdir()
    assert summary(seen(running()))["restart_pending"] is None


def test_a_damaged_runtime_file_is_nothing_to_compare_with() -> None:
    for data in ("{", "[]", '{"spec": 5}', '{"spec": {"disks": 5, "nics": {}}}'):
        (paths.RUNTIME_DIR / "web1.json").write_text(data)
        one = seen(running(), disks=[{"path": "/b"}])
        assert row(one)[0] == "web1"
        assert details(one)["name"] == "web1"


# One of them


def test_where_to_look_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "RUNTIME_DIR", Path("/var/lib/x"))
    found = details(seen(memory_mib=1024))
    assert found["qmp"] == str(paths.CONTROL_DIR / "web1.qmp")
    assert found["console"] == str(paths.CONTROL_DIR / "web1.serial")
    assert details(seen(serial_console=False))["console"] is None
    assert (found["pid"], found["since"], found["restart_pending"]) == (None, None, None)
    assert found["runtime"] == "/var/lib/x/web1.json"


@pytest.mark.parametrize("answer", [Refused("no"), {}, [], None])
def test_a_qemu_that_says_nothing_is_told(qemus: FakeQemus, answer: Any) -> None:
    qemus.start(InstanceFiles("web1").qmp, answers={"query-status": answer})
    assert details(seen(running()))["qemu"].startswith("nothing: ")


def test_what_qemu_has_and_who_its_guest_says_to_be(qemus: FakeQemus) -> None:
    write_runtime_file(seen().spec)
    disk = "disk-0c000000-pci-20"
    opaque = f'{disk} 0c000000-0000-4000-8000-00000000000c {{"path": "/hot\\u001b[2J"}}'
    channel = {"label": "agent", "filename": "unix:/x", "frontend-open": True}
    answers = {
        "query-status": {"status": "running"},
        "qom-list": [{"name": disk, "type": "child<virtio-blk-pci>"}],
        "qom-get": "0c000000-0000-4000-8",
        "query-fdsets": [{"fdset-id": 1, "fds": [{"fd": 9, "opaque": opaque}]}],
        "query-chardev": [{"label": "compat_monitor0"}, channel],
    }
    qemus.start(InstanceFiles("web1").qmp, answers=answers)
    reply = [
        {"name": "lo", "ip-addresses": [{"ip-address": "127.0.0.1", "prefix": 8}]},
        {
            "name": "eth0\x1b[2J",
            "hardware-address": "52:54:00:00:00:0A",
            "ip-addresses": [
                {"ip-address": "192.0.2.7", "prefix": 24, "ip-address-type": "ipv4"},
                {"ip-address": "\x1b[2J", "prefix": 24},
                {"ip-address": "192.0.2.8", "prefix": float("inf")},
                {"ip-address": "192.0.2.8"},
            ],
        },
        {"name": "eth1"},
        5,
    ]

    def answers_both(it: Agent) -> None:
        it.answer()
        it.hear()
        it.say({"return": reply})

    with agent(InstanceFiles("web1").agent, answers_both):
        found = details(seen(running()))
    assert found["guest_addresses"] == [
        {
            "interface": "eth0\\x1b[2J",
            "mac": "52:54:00:00:00:0a",
            "address": "192.0.2.7",
            "prefix": 24,
        }
    ]
    (one,) = found["disks"]
    assert (one["slot"], one["since_start"], one["by_hand"]) == (20, False, True)
    assert found["nics"] == []
    lines = list(report_lines(found))
    assert not [line for line in lines if not line.isprintable()]
    (line,) = [line for line in lines if line.startswith("Disk:")]
    assert line.endswith("slot 20, plugged in since the start, added by hand")
    assert any("192.0.2.7/24 on eth0" in line for line in lines)


@pytest.mark.parametrize(
    ("mode", "link", "ips", "said"),
    [
        ("bridged", "br0", [], "vm-1 on br0, slot 13"),
        ("routed", "", ["192.0.2.7", "2001:db8::7"], "vm-1 routed 192.0.2.7 2001:db8::7, slot 13"),
        ("routed", "100", ["192.0.2.7"], "vm-1 routed on 100 192.0.2.7, slot 13"),
    ],
)
def test_where_the_tap_of_a_nic_leads(mode: str, link: str, ips: list[str], said: str) -> None:
    nic = {"mac": "52:54:00:00:00:0a", "mode": mode, "link": link, "ips": ips}
    found = details(seen(running(), nics=[nic]))
    (row,) = found["spec"]["nics"]
    plugged = {"mac": row["mac"], "uuid": row["uuid"], "tap": "vm-1", "link": link or None}
    found["nics"] = [{**plugged, "slot": 13, "since_start": True, "by_hand": False}]
    (line,) = [line for line in report_lines(found) if line.startswith("NIC:")]
    assert said in line


def test_without_an_agent_nobody_waits_for_one(qemus: FakeQemus) -> None:
    closed = [{"label": "agent", "frontend-open": False}]
    answers = {"query-status": {"status": "io-error"}, "query-chardev": closed, "qom-list": []}
    qemus.start(InstanceFiles("web1").qmp, answers=answers)
    found = details(seen(running()))
    assert (found["qemu"], found["guest_addresses"]) == ("io-error", None)


@pytest.mark.parametrize("noted", [None, Halt("io-error", "full"), Halt("suspended")])
@pytest.mark.parametrize("state", ["running", "io-error", "paused", "nothing"])
def test_qemu_knows_best_how_it_stands_still(
    qemus: FakeQemus, noted: Halt | None, state: str
) -> None:
    """Also where no brine-kvmd has noted anything, or it is off since."""
    if state != "nothing":
        answers = {"query-status": {"status": state}, "query-chardev": [], "qom-list": []}
        qemus.start(InstanceFiles("web1").qmp, answers=answers)
    found = details(replace(seen(running()), halted=noted))
    expected = {"running": None, "nothing": noted and noted.state}.get(state, state)
    assert (found["halted"] or {}).get("state") == expected
    assert found["status"] == ("ERROR_halted" if expected == "io-error" else "running")
    assert found["paused"] == (expected == "paused")
    if noted and noted.state == state:
        assert found["halted"]["reason"] == "full"
    if state == "paused":  # it is Brine's own pause, if a marker says so
        found = details(replace(seen(running()), halted=noted, run=marked_run(MarkerKind.PAUSED)))
        assert (found["halted"], found["paused"]) == (None, True)


@pytest.mark.parametrize("bind", ["127.0.0.1", "::1"])
def test_the_port_that_it_has_found_is_named(bind: str) -> None:
    """This process stands for QEMU."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((bind, 0))
        except OSError:
            pytest.skip(f"this machine has no {bind}")
        listener.listen()
        port = listener.getsockname()[1]
        one = seen(running(main_pid=os.getpid()), vnc_bind=bind)
        host = f"[{bind}]" if ":" in bind else bind
        assert summary(one)["vnc"] == f"{host}:{port}"
        assert summary(seen(running(main_pid=0), vnc_bind=bind))["vnc"] is None
    assert summary(one)["vnc"] is None


def test_a_socket_for_vnc_is_where_it_was_said_to_be() -> None:
    assert summary(seen(running(), vnc_bind="/run/web1.vnc"))["vnc"] == "/run/web1.vnc"
    assert summary(seen(None, vnc_bind="/run/web1.vnc"))["vnc"] is None


def test_of_one_that_has_run_the_verdict_is_told() -> None:
    run = Run("web1", RUN)
    assert details(replace(seen(), run=run))["verdict"] is None
    write_marker(MarkerKind.VERDICT, "web1", run=RUN, who="crash", cause="guest-panic")
    assert details(replace(seen(running()), run=run))["verdict"] is None
    assert details(seen())["verdict"] is None  # it is on a run that nobody knows of
    found = details(replace(seen(), run=run))
    assert found["verdict"] == {"who": "crash", "cause": "guest-panic"}
    assert any(
        line.endswith("crash (guest-panic), by the verdict of brine-kvmd")
        for line in report_lines(found)
    )


def test_that_nobody_knows_who_ended_it_is_no_verdict_of_kvmds() -> None:
    write_marker(MarkerKind.VERDICT, "web1", run=RUN, who="unknown", cause="kvmd is off")
    found = details(replace(seen(), run=Run("web1", RUN)))
    assert found["verdict"] == {"who": "unknown", "cause": "kvmd is off"}
    assert any(line.endswith(" unknown (kvmd is off)") for line in report_lines(found))


def test_who_only_says_to_be_qemu_is_not_believed(
    qemus: FakeQemus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "runs_in", lambda *_: False)
    monitor = qemus.start(
        InstanceFiles("web1").qmp, answers={"query-status": {"status": "running"}}
    )
    told = details(seen(running()))["qemu"]
    assert told.startswith("nothing: ")
    assert "web1.qmp: another process" in told
    assert monitor.received == []


def test_a_qemu_that_hangs_holds_nobody_up(
    qemus: FakeQemus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brine.instance.report._ANSWER_S", 0.2)
    qemus.start(InstanceFiles("web1").qmp, greet=False)
    assert "no greeting within 0.2 s" in details(seen(running()))["qemu"]


@pytest.mark.parametrize("unit", [None, Unit("web1", Active.INACTIVE)])
def test_what_does_not_run_is_not_asked(qemus: FakeQemus, unit: Unit | None) -> None:
    monitor = qemus.start(InstanceFiles("web1").qmp)
    assert details(seen(unit))["qemu"] is None
    assert monitor.connections == 0


def test_a_person_is_told_in_lines(qemus: FakeQemus) -> None:
    qemus.start(InstanceFiles("web1").qmp, answers={"query-status": {"status": "running"}})
    lines = list(report_lines(details(seen(running(), tags=["a"]))))
    known = dict(line.split(":", 1) for line in lines)
    assert known["Instance"].strip() == "web1"
    assert known["Status"].strip() == "running"
    assert known["Admin state"].strip() == "up, set by an administrator"
    assert known["QEMU's process"].strip() == "4711"
    assert known["QEMU says"].strip() == "running"
    assert "Why" not in known
    spec = lines[lines.index("Spec:") + 1 :]
    assert "  vcpus: 1" in spec
    assert '  tags: ["a"]' in spec
    assert not any(line.startswith("  name:") for line in spec)  # which stands above


def test_a_person_is_told_why() -> None:
    lines = list(report_lines(details(seen(shut_down=True))))
    (why,) = [line for line in lines if line.startswith("Why:")]
    assert why.endswith(f" {BY_USER}")
    assert not any(line.startswith(("QEMU", "Since")) for line in lines)


# Whether it can move


def movable(one: Observed) -> list[str]:
    """What a person is told of that."""
    lines = [line.partition(":") for line in report_lines(details(one))]
    return [text.strip() for label, _, text in lines if label == "Movable"]


def test_one_without_ties_is_movable() -> None:
    found = details(seen(cpu="Haswell"))
    assert (found["movable"], found["obstacles"]) == (True, [])
    assert movable(seen(cpu="Haswell")) == ["yes"]


def test_what_only_a_running_one_can_not_take_along(qemus: FakeQemus) -> None:
    """It moves while it does not run."""
    stopped = seen(cpu="host", extra_arguments=["-device", "edu"])
    found = details(stopped)
    assert found["movable"]
    assert [one["id"] for one in found["obstacles"]] == ["extra_arguments", "cpu"]
    assert all(one["blocks"] == ["live"] for one in found["obstacles"])
    first, second, third = movable(stopped)
    assert first == "yes, while it does not run"
    assert second.startswith("not while it runs, because extra_arguments ")
    assert third.startswith("not while it runs, because cpu is host")
    write_runtime_file(stopped.spec)
    going = seen(running(), cpu="host", extra_arguments=["-device", "edu"])
    assert not details(going)["movable"]
    *reasons, last = movable(going)
    assert [one.partition(" because ")[0] for one in reasons] == ["no,"] * 2
    assert last == "yes, once it is stopped"


def test_what_it_can_never_take_along() -> None:
    one = seen(cpu="Haswell", disks=[{"path": "/srv/x.img"}])
    assert movable(one) == [
        "no, because disk /srv/x.img is in no storage unit, so it can't be copied"
    ]
    (obstacle,) = details(one)["obstacles"]
    assert (obstacle["id"], obstacle["blocks"]) == ("disk", ["live", "cold"])


def test_what_runs_counts_and_not_what_the_next_start_has() -> None:
    write_runtime_file(seen(cpu="Haswell").spec)
    assert movable(seen(running(), cpu="host")) == ["yes"]


def test_a_plugged_disk_counts() -> None:
    write_runtime_file(seen(cpu="Haswell").spec)
    plug("disks", Disk(uuid=A, path="/hot").entry(1, pci_slot(20)))
    assert [one["id"] for one in details(seen(running(), cpu="Haswell"))["obstacles"]] == ["disk"]


def test_a_qemu_with_other_devices_than_its_runtime_file_is_not_movable(qemus: FakeQemus) -> None:
    write_runtime_file(seen(cpu="Haswell").spec)
    disk = "disk-0c000000-pci-20"
    answers = {
        "query-status": {"status": "running"},
        "qom-list": [{"name": disk, "type": "child<virtio-blk-pci>"}],
        "qom-get": "0c000000-0000-4000-8",
        "query-fdsets": [],
        "query-chardev": [],
    }
    qemus.start(InstanceFiles("web1").qmp, answers=answers)
    (one,) = details(seen(running(), cpu="Haswell"))["obstacles"]
    assert one["id"] == "slots"
    assert disk in one["why"]


def test_a_damaged_runtime_file_starts_no_qemu_elsewhere() -> None:
    write_runtime_file(seen(cpu="Haswell").spec)
    plug("disks", {"uuid": A, "path": 7})
    found = details(seen(running(), cpu="Haswell"))["obstacles"]
    assert [one["id"] for one in found] == ["runtime_file"]


def test_a_domain_of_xens_moves_cold() -> None:
    found = details(seen(hypervisor="xen-pvh", kernel="/boot/vmlinuz"))
    assert (found["movable"], [one["id"] for one in found["obstacles"]]) == (True, ["xen"])
