"""The watcher on real nodes of both releases: each row of its table, on real guests with kvmd."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lab.command import CommandError
from lab.fake_qemu import FakeQemus
from lab.node import Node
from lab.waiting import wait_for
from node.instance_on_node import (
    IDLE,
    UNITS,
    boot,
    boot_idle,
    define,
    define_copies,
    held_back,
    info,
    order,
    qmp,
    run_in_guest,
    serial_line,
    start,
    wait_ready,
    wait_status,
)
from node.kvmd_on_node import wait_verdict, wait_watching
from node.watcher_on_node import (
    RECORD,
    TIMER,
    invocation,
    kill,
    let_pass,
    mark_user_shutdown,
    node_with_watcher,
    outbox,
    passed,
    told,
    tries,
)

ENDED = "brine-watcher-ended.path"
PANICS = 1000


@pytest.fixture(scope="module")
def node(release: str, packages: list[Path]) -> Iterator[Node]:
    with node_with_watcher(release, packages) as node:
        yield node


@pytest.fixture(autouse=True)
def nothing_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each story begins and ends without instances."""
    yield
    if "node" not in request.fixturenames:
        return
    node = request.getfixturevalue("node")
    node.shell("systemctl kill --signal=KILL 'brine-instance@*' 2>/dev/null || :")
    node.shell("systemctl stop 'brine-instance@*'; systemctl reset-failed")
    node.shell("rm -f /var/lib/brine/instances/* /var/lib/brine/runtime/*.json")
    node.shell("rm -f /run/brine/ctrl/* /run/brine/marks/*")
    node.shell("rm -rf /var/lib/brine/watcher.* /var/lib/brine/outbox /etc/brine/watcher.toml")
    node.shell(f"rm -rf {UNITS}/brine-instance@* {UNITS}/{TIMER}.d; systemctl daemon-reload")


@contextmanager
def without_kernel(node: Node) -> Iterator[None]:
    """Have no guest be able to start meanwhile."""
    node.run(["mv", "/srv/guest/kernel", "/srv/guest/kernel.away"])
    try:
        yield
    finally:
        node.run(["mv", "/srv/guest/kernel.away", "/srv/guest/kernel"])


def test_what_its_user_powers_off_stays_off_and_the_cluster_hears_of_it(node: Node) -> None:
    boot(node, "web1")
    wait_watching(node, "web1")
    order(node, "web1", "poweroff")
    wait_status(node, "web1", "USER_down")

    would = passed(node, "--dry-run")["web1"]
    assert (would["actions"], would["ended_by"]) == (["set-down"], "user")
    assert info(node, "web1")["admin_state"] == "up"

    assert passed(node)["web1"]["actions"] == ["set-down"]
    found = info(node, "web1")
    assert (found["status"], found["admin_state"]) == ("USER_down", "down")
    assert found["admin_state_source"] == "user"
    assert passed(node)["web1"]["actions"] == []
    assert told(node, "web1") == ["user-down"]

    (event,) = outbox(node)
    assert (event["kind"], event["name"]) == ("admin-state", "web1")
    assert event["instance"] == found["uuid"]
    assert event["data"] == {"admin_state": "down", "source": "user"}
    node.run(["brine", "outbox", "acknowledge", event["id"]])
    assert outbox(node) == []
    assert "unchanged" in node.run(["brine", "outbox", "acknowledge", event["id"]]).stdout
    again = node.run(["brine", "outbox", "acknowledge", event["id"], "--json"]).stdout
    assert json.loads(again) == {"acknowledged": []}


def test_what_is_to_start_again_does_as_often_as_its_user_ends_it(node: Node) -> None:
    boot(node, "again1", user_shutdown="restart")
    for times in (1, 2):
        wait_watching(node, "again1", times=times)
        order(node, "again1", "poweroff")
        wait_verdict(node, "again1", times=times)
        wait_for("it to be seen", lambda: info(node, "again1")["oper_state"] == "S")
        assert passed(node)["again1"]["actions"] == ["start"]
        wait_ready(node, "again1")
    assert info(node, "again1")["status"] == "running"
    assert tries(node) == {}
    assert outbox(node) == []


def test_what_crashes_comes_back(node: Node) -> None:
    define(node, "crash1")
    define(node, "panic1")
    for name in ("crash1", "panic1"):
        start(node, name)
        wait_watching(node, name)
    order(node, "panic1", "crash")
    wait_verdict(node, "panic1")
    wait_status(node, "panic1", "ERROR_down")
    kill(node, "crash1")

    found = passed(node)
    for name in ("crash1", "panic1"):
        assert found[name]["actions"] == ["try"], name
        assert found[name]["ended_by"] == "crash", name
        wait_ready(node, name)
        assert tries(node)[name]["count"] == 1, name
        assert told(node, name) == ["restart-tried"], name


KILLED_DEFINITION = """
import os
from brine.common import cli
from brine.instance import store
store.save = lambda *_, **__: os._exit(9)
cli.main(["instance", "define", "-"])
"""


@pytest.mark.parametrize("service", ["brine-watcher.service", "brine-watcher-ended.service"])
def test_what_crashes_comes_back_after_a_command_that_was_killed_while_it_made_a_disk(
    node: Node, service: str
) -> None:
    """The services of the watcher may not write to storage, and have another one settle that."""
    folder = "/srv/units"
    node.shell(f"mkdir -p {folder} && chmod 0750 {folder}")
    node.write("/etc/brine/storage.toml", f'directories = ["{folder}"]\n')
    boot_idle(node, "web1")
    wait_watching(node, "web1")
    spec = json.loads(node.read("/var/lib/brine/instances/web1.json"))
    spec["disks"] = [{"name": "data", "unit": folder, "size_mib": 8}]
    try:
        done = node.run(["python3", "-c", KILLED_DEFINITION], stdin=json.dumps(spec), check=False)
        assert done.returncode == 9, done.stderr
        (record,) = json.loads(node.run(["brine", "operations", "list", "--json"]).stdout)
        assert (record["key"], record["in_progress"]) == ("instance/web1", False)
        assert node.shell(f"ls {folder}") != ""
        kill(node, "web1")
        node.run(["systemctl", "start", service], check=False)
        wait_status(node, "web1", "running")
        assert node.run(["brine", "operations", "list", "--json"]).stdout == "[]\n"
        assert node.shell(f"ls {folder}") == ""
        assert tries(node)["web1"]["count"] == 1
    finally:
        node.shell("brine operations settle; rm -f /etc/brine/storage.toml", timeout_s=120)


def test_a_signal_that_nobody_explains_is_no_stop(node: Node) -> None:
    """earlyoom, or a stray kill: QEMU ends in order, and reports a signal."""
    boot_idle(node, "term1")
    wait_watching(node, "term1")
    node.run(["systemctl", "kill", "--kill-whom=main", "--signal=TERM", "brine-instance@term1"])
    assert wait_verdict(node, "term1") == ("crash", "host-signal")
    found = wait_status(node, "term1", "ERROR_down")
    assert found["why"] == "it should be up but is down: it crashed (host-signal)"
    assert passed(node)["term1"]["actions"] == ["try"]
    assert info(node, "term1")["status"] == "running"


def test_a_stop_whose_own_step_fails_is_a_stop(node: Node) -> None:
    """Half-upgraded, say: nothing marks it, and systemd sends QEMU a signal."""
    define(node, "web1", **IDLE)
    drop_in = f"{UNITS}/brine-instance@web1.service.d/fails.conf"
    node.write(drop_in, "[Service]\nExecStop=\nExecStop=/bin/false\n")
    node.run(["systemctl", "daemon-reload"])
    node.run(["brine", "instance", "start", "web1"])
    wait_watching(node, "web1")
    node.run(["systemctl", "stop", "brine-instance@web1"])
    assert passed(node)["web1"]["actions"] == []
    assert info(node, "web1")["oper_state"] == "down"


def test_without_kvmd_an_end_in_order_is_the_users(node: Node) -> None:
    units = ["brine-kvmd.path", "brine-kvmd.service", "brine-kvmd-retry.timer"]
    node.run(["systemctl", "stop", *units])
    try:
        define(node, "off1")
        define_copies(node, "off1", ["again1", "panic1"])
        define(node, "again1", user_shutdown="restart")
        for name in ("off1", "again1", "panic1"):
            start(node, name)
        for name, last in (("off1", "poweroff"), ("again1", "poweroff"), ("panic1", "crash")):
            order(node, name, last)
            found = wait_status(node, name, "ERROR_down")
            if last == "poweroff":
                assert found["why"].endswith("who ended it is unknown (kvmd is off)")
        found = passed(node)
        assert found["off1"]["actions"] == ["set-down"]
        assert found["off1"]["ended_by"] == "unknown"
        assert found["again1"]["actions"] == ["start"]
        assert found["panic1"]["actions"] == ["try"]
        assert info(node, "off1")["status"] == "USER_down"
        # What its admin stops is the admin's with and without it.
        node.run(["systemctl", "stop", "brine-instance@again1"])
        assert passed(node)["again1"]["actions"] == []
    finally:
        node.run(["systemctl", "start", "brine-kvmd.path"])


def test_a_thousand_panics_while_the_journal_stands_still_are_a_thousand_verdicts(
    node: Node,
) -> None:
    names = [f"vm{number}" for number in range(PANICS)]
    control = node.path("/run/brine/ctrl")
    node.run(["systemctl", "start", "brine-kvmd"])
    umask = os.umask(0o007)  # so that kvmd may connect
    try:
        with FakeQemus() as qemus:
            peers = [qemus.start(control / f"{name}.kvmd") for name in names]
            for one in peers:
                one.wait_connected()
            watched = ["systemctl", "show", "--property=StatusText", "--value", "brine-kvmd"]
            wait_for(
                "all to be watched",
                lambda: f"watching {PANICS} " in node.run(watched).stdout,
                timeout_s=60,
            )
            node.run(["systemctl", "kill", "--signal=STOP", "systemd-journald"])
            try:
                for one in peers:
                    one.emit("GUEST_PANICKED", action="poweroff")
                    one.emit_last("SHUTDOWN", guest=True, reason="guest-panic")
                marks = node.path("/run/brine/marks")
                wait_for(
                    "a verdict on each, while nothing gets into the journal",
                    lambda: all((marks / f"{name}.verdict").exists() for name in names),
                    timeout_s=60,
                )
            finally:
                node.run(["systemctl", "kill", "--signal=CONT", "systemd-journald"])
    finally:
        os.umask(umask)
    shown = json.loads(node.run(["brine", "kvmd", "verdicts", *names, "--json"]).stdout)
    assert sorted(line["instance"] for line in shown) == sorted(names)
    assert {(line["verdict"], line["cause"]) for line in shown} == {("crash", "guest-panic")}


@pytest.mark.parametrize("way", ["brine instance stop", "systemctl stop"])
def test_what_an_admin_stopped_stays_so(node: Node, way: str) -> None:
    boot_idle(node, "stop1")
    if way == "systemctl stop":
        node.run(["systemctl", "stop", "brine-instance@stop1"])
    else:
        node.run(["brine", "instance", "stop", "--force", "stop1"])
    before = invocation(node, "stop1")
    assert passed(node)["stop1"]["actions"] == []
    assert info(node, "stop1")["oper_state"] == "down"
    assert invocation(node, "stop1") == before


def test_a_start_that_is_called_off_names_its_own_unit(node: Node) -> None:
    define(node, "halted2", **IDLE)

    def said() -> str:
        records = node.journal("_SYSTEMD_UNIT=start2.service")
        return "\n".join(str(one["MESSAGE"]) for one in records)

    with held_back(node, "halted2"):
        node.run(["systemd-run", "--unit=start2", "brine", "instance", "start", "halted2"])
        wait_status(node, "halted2", "starting")
        node.run(["systemctl", "stop", "brine-instance@halted2"])
    wait_for("the start's error", lambda: "halted2: did not start" in said())
    assert "Job for brine-instance@halted2.service canceled" in said()


def test_what_an_admin_stopped_while_it_started_stays_so(node: Node) -> None:
    define(node, "halted1", admin_state="up", **IDLE)
    # A failure before it is past.
    with without_kernel(node):
        node.run(["systemctl", "start", "brine-instance@halted1"], check=False)
    with held_back(node, "halted1"):
        node.run(["systemctl", "start", "--no-block", "brine-instance@halted1"])
        wait_status(node, "halted1", "starting")
        node.run(["systemctl", "stop", "brine-instance@halted1"])
    before = invocation(node, "halted1")
    found = passed(node)["halted1"]
    assert (found["actions"], found["ended_by"]) == ([], "admin")
    assert info(node, "halted1")["why"].endswith("it was stopped")
    assert invocation(node, "halted1") == before

    # Which is not so where a start ends by itself.
    with without_kernel(node):
        node.run(["systemctl", "start", "brine-instance@halted1"], check=False)
    found = passed(node)["halted1"]
    assert (found["actions"], found["ended_by"]) == (["try"], "failed")


@pytest.mark.parametrize(
    ("name", "starter"),
    [("queued1", "brine instance start queued1"), ("queued2", "brine watcher run")],
)
def test_what_an_admin_stopped_before_it_started_stays_so(
    node: Node, name: str, starter: str
) -> None:
    """systemd has queued the start, and runs nothing of the unit when the admin calls it off."""
    define(node, name, admin_state="up", **IDLE)
    # Its last run failed, so that the watcher starts it, too.
    with without_kernel(node):
        node.run(["systemctl", "start", f"brine-instance@{name}"], check=False)
    place = "/run/systemd/system"
    node.write(f"{place}/never.service", "[Service]\nType=oneshot\nExecStart=sleep infinity\n")
    drop_in = f"{place}/brine-instance@{name}.service.d"
    node.write(f"{drop_in}/never.conf", "[Unit]\nWants=never.service\nAfter=never.service\n")
    node.run(["systemctl", "daemon-reload"])
    node.run(["systemd-run", "--unit=starter1", "--remain-after-exit", *starter.split()])
    wait_for("the start", lambda: "has not begun its start" in info(node, name)["why"])
    node.run(["systemctl", "stop", f"brine-instance@{name}"])
    node.shell("while [ $(systemctl show --value -p MainPID starter1) != 0 ]; do sleep 0.1; done")
    node.run(["systemctl", "stop", "starter1", "never"])
    node.run(["rm", "-r", drop_in, f"{place}/never.service"])
    node.run(["systemctl", "daemon-reload"])

    found = info(node, name)
    assert (found["status"], found["oper_state"]) == ("ERROR_down", "down")
    assert found["why"].endswith("it was stopped")
    told = node.journal("BRINE_EVENT=start-called-off", f"BRINE_INSTANCE={name}")
    assert len(told) == 1
    passed_by = passed(node)[name]
    assert (passed_by["actions"], passed_by["ended_by"]) == ([], "admin")
    node.run(["brine", "instance", "start", name])
    wait_status(node, name, "running")
    node.run(["brine", "instance", "stop", "--force", name])


def test_a_guest_that_follows_a_reboot_late_comes_back(node: Node) -> None:
    define(node, "boot1", **IDLE)
    for times, way in enumerate(["by itself", "systemctl stop"], 1):
        node.run(["brine", "instance", "start", "boot1"])
        wait_watching(node, "boot1", times=times)
        done = node.run(["brine", "instance", "reboot", "boot1"], check=False)
        assert "did not shut down within 1 s, and runs on" in done.stderr
        if way == "by itself":
            # As it does that never hears the power button.
            qmp(node, "boot1", "quit")
            wait_verdict(node, "boot1")
            wait_status(node, "boot1", "ERROR_down")
            found = passed(node)["boot1"]
            assert (found["actions"], found["ended_by"]) == (["try"], "reboot")
            assert found["why"] == "it was to reboot: try 1 of 5"
            assert info(node, "boot1")["status"] == "running"
        else:
            node.run(["systemctl", "stop", "brine-instance@boot1"])
            found = passed(node)["boot1"]
            assert (found["actions"], found["ended_by"]) == ([], "admin")


def test_a_guest_that_follows_a_stop_late_comes_back_after_a_start(node: Node) -> None:
    boot_idle(node, "late1")
    wait_watching(node, "late1")
    done = node.run(["brine", "instance", "stop", "late1"], check=False)
    assert "did not shut down within 1 s, and runs on" in done.stderr
    node.run(["brine", "instance", "start", "late1"])
    qmp(node, "late1", "quit")
    wait_verdict(node, "late1")
    wait_status(node, "late1", "ERROR_down")
    found = passed(node)["late1"]
    assert (found["actions"], found["ended_by"]) == (["try"], "reboot")
    assert info(node, "late1")["status"] == "running"


def test_what_is_paused_or_just_starting_or_being_stopped_is_left_alone(node: Node) -> None:
    for name in ("pause1", "slow1", "stop1"):
        define(node, name, **{**IDLE, "shutdown_timeout": 20})
    for name in ("pause1", "stop1"):
        node.run(["brine", "instance", "start", name])
    qmp(node, "pause1", "stop")
    with held_back(node, "slow1"):
        node.run(["systemctl", "start", "--no-block", "brine-instance@slow1"])
        node.shell(
            'sed -i \'s/"admin_state": "down"/"admin_state": "up"/\' '
            "/var/lib/brine/instances/slow1.json"
        )
        stopping = subprocess.Popen(node.command(["brine", "instance", "stop", "--force", "stop1"]))
        try:
            stopping_mark = node.path("/run/brine/marks/stop1.stop")
            wait_for("it to be stopped", stopping_mark.exists)
            pids = [info(node, name)["pid"] for name in ("pause1", "stop1")]
            found = passed(node)
            assert {name: one["actions"] for name, one in found.items()} == {
                "pause1": [],
                "slow1": [],
                "stop1": [],
            }
            assert found["slow1"]["why"] == "it is just starting"
            assert found["stop1"]["why"] in (
                "it is just stopping",
                "another process is working on it",
            )
            assert [info(node, name)["pid"] for name in ("pause1", "stop1")] == pids
        finally:
            assert stopping.wait(60) == 0
    assert passed(node)["stop1"]["actions"] == []
    assert info(node, "stop1")["status"] == "ADMIN_down"


def test_what_is_no_instance_of_ours_is_left_alone(node: Node) -> None:
    boot_idle(node, "web1")
    pid = info(node, "web1")["pid"]
    node.run(["rm", "/var/lib/brine/instances/web1.json"])
    node.run(["brine", "watcher", "run"], check=False)
    assert node.path(f"/proc/{pid}").exists()
    node.shell(f"kill -KILL {pid}")
    wait_for("it to end", lambda: not node.path(f"/proc/{pid}").exists())
    before = invocation(node, "web1")
    node.run(["brine", "watcher", "run"], check=False)
    assert invocation(node, "web1") == before


def test_a_damaged_spec_stops_no_other(node: Node) -> None:
    boot_idle(node, "web1")
    kill(node, "web1")
    node.write("/var/lib/brine/instances/bad1.json", "{")
    done = node.run(["brine", "watcher", "run"], check=False)
    assert done.returncode == 1
    assert "brine: error: bad1: " in done.stderr
    assert info(node, "web1")["status"] == "running"


def test_what_never_stays_up_is_given_up_which_is_said_once(node: Node) -> None:
    boot_idle(node, "never1")
    kill(node, "never1")
    with without_kernel(node):
        for count in range(1, 6):
            found = passed(node, status=1)["never1"]
            assert (found["actions"], tries(node)["never1"]["count"]) == (["try"], count)
            assert "did not start" in found["error"]
            if count < 5:
                waiting = passed(node)["never1"]
                assert waiting["actions"] == []
                assert f"try {count + 1} of 5 is due in" in waiting["why"]
                let_pass(node, 300 * 2 ** (count - 1))
        found = passed(node, status=3)["never1"]
        assert found["actions"] == ["give-up"]
        for count in (6, 7):
            let_pass(node, 8 * 3600 - 600)
            found = passed(node, status=3)["never1"]
            assert found["actions"] == []
            assert "lacks /srv/guest/kernel, and was given up" in found["why"]
            let_pass(node, 600)
            assert passed(node, status=1)["never1"]["actions"] == ["try"]
            assert tries(node)["never1"]["count"] == count
        assert told(node, "never1") == [*["restart-tried"] * 5, "given-up", *["restart-tried"] * 2]
        listed = node.run(["brine", "instance", "list"]).stdout
        assert "given up after 7 tries" in listed
        assert passed(node, status=3)["never1"]["actions"] == []
    # What it lacks is there again; but this time something else is in its way.
    drop_in = f"{UNITS}/brine-instance@never1.service.d/fails.conf"
    node.write(drop_in, "[Service]\nExecStartPre=/bin/false\n")
    node.run(["systemctl", "daemon-reload"])
    assert passed(node, status=1)["never1"]["actions"] == ["try"]
    assert passed(node, status=3)["never1"]["actions"] == []
    assert tries(node)["never1"]["given_up"]
    node.shell(f"rm {drop_in}; systemctl daemon-reload")
    node.run(["systemctl", "reset-failed", "brine-instance@never1"])
    assert passed(node)["never1"]["actions"] == ["try"]
    assert tries(node)["never1"]["count"] == 1
    assert info(node, "never1")["status"] == "running"
    node.run(["brine", "instance", "stop", "--force", "never1"])

    # Who mends it and starts it has it be as good as new.
    node.run(["brine", "instance", "start", "never1"])
    assert tries(node) == {}
    kill(node, "never1")
    assert passed(node)["never1"]["actions"] == ["try"]


def test_tries_are_forgotten_after_a_quiet_time_or_when_somebody_says_so(node: Node) -> None:
    boot_idle(node, "web1")
    kill(node, "web1")
    passed(node)
    let_pass(node, 8 * 3600 - 60)
    assert passed(node)["web1"]["actions"] == []
    let_pass(node, 60)
    assert passed(node)["web1"]["actions"] == ["forget"]
    assert tries(node) == {}

    kill(node, "web1")
    passed(node)
    assert "forgotten: web1" in node.run(["brine", "watcher", "forget", "web1"]).stdout
    assert "unchanged" in node.run(["brine", "watcher", "forget", "web1"]).stdout
    assert tries(node) == {}
    kill(node, "web1")
    passed(node)
    node.run(["brine", "instance", "stop", "--force", "web1"])
    node.run(["brine", "instance", "undefine", "web1"])
    passed(node)
    assert tries(node) == {}


def test_a_damaged_record_is_kept_aside_and_said(node: Node) -> None:
    boot_idle(node, "web1")
    kill(node, "web1")
    node.write(RECORD, '{"version": 1, "instances": {"web1"')
    with pytest.raises(CommandError, match="damaged"):
        node.run(["brine", "watcher", "status"])
    assert info(node, "web1")["status"] == "ERROR_down"
    done = node.run(["brine", "watcher", "run"])
    assert "damaged" in done.stderr
    assert node.read(f"{RECORD}.damaged") == '{"version": 1, "instances": {"web1"'
    assert tries(node)["web1"]["count"] == 1
    assert info(node, "web1")["status"] == "running"


def test_one_that_is_stuck_does_not_hold_up_the_rest(node: Node) -> None:
    node.write("/etc/brine/watcher.toml", "instance_timeout = 30\nparallel = 2\n")
    names = ["web1", "web2", "web3"]
    define(node, "stuck1", **IDLE)
    define_copies(node, "stuck1", names)
    for name in ("stuck1", *names):
        node.run(["brine", "instance", "start", name])
    kill(node, "stuck1", *names)
    with held_back(node, "stuck1"):
        with ThreadPoolExecutor(1) as pool:
            begun = time.monotonic()
            work = pool.submit(passed, node, status=1)
            for name in names:
                wait_status(node, name, "running")
            assert not work.done()
            found = work.result()
        assert time.monotonic() - begun < 60
        assert "has not started within 30 s" in found["stuck1"]["error"]
        assert passed(node)["stuck1"]["why"] == "it is just starting"


def test_two_passes_at_once_are_one(node: Node) -> None:
    boot_idle(node, "slow1")
    kill(node, "slow1")
    with ThreadPoolExecutor(2) as pool:
        with held_back(node, "slow1"):
            work = pool.submit(passed, node)
            wait_for("a pass to be made", lambda: told(node, "slow1") != [], timeout_s=30)
            done = node.run(["brine", "watcher", "run"], check=False)
            assert done.returncode == 4
            assert "another pass is in progress" in done.stderr
            wait_status(node, "slow1", "starting")
            assert passed(node, "--dry-run")["slow1"]["why"] == "it is just starting"
            # The timer's service takes that for no failure.
            node.run(["systemctl", "start", "brine-watcher.service"])
            # Who needs room waits for it.
            cleanup = pool.submit(node.run, ["brine", "watcher", "cleanup"])
            with pytest.raises(TimeoutError):
                cleanup.result(2)
        cleanup.result()
        assert work.result()["slow1"]["actions"] == ["try"]
    assert tries(node)["slow1"]["count"] == 1


def test_a_pause_has_it_rest(node: Node) -> None:
    boot_idle(node, "web1")
    kill(node, "web1")
    assert "paused until" in node.run(["brine", "watcher", "pause", "2h"]).stdout
    assert passed(node) == {}
    assert passed(node, "--dry-run")["web1"]["actions"] == ["try"]
    assert info(node, "web1")["status"] == "ERROR_down"
    assert "resumed" in node.run(["brine", "watcher", "resume"]).stdout
    assert passed(node)["web1"]["actions"] == ["try"]
    # A pause that is over is none.
    node.write("/var/lib/brine/watcher.pause", f"{time.time() - 1:.0f}\n")
    assert "not paused" in node.run(["brine", "watcher", "status"]).stdout
    node.write("/var/lib/brine/watcher.pause", "soon\n")
    with pytest.raises(CommandError, match="brine watcher resume removes it"):
        node.run(["brine", "watcher", "run"])


def test_cleanup_starts_nothing_and_keeps_users_wills(node: Node) -> None:
    define(node, "clean1", **IDLE)
    define(node, "clean2", **IDLE)
    for name in ("clean1", "clean2"):
        node.run(["brine", "instance", "start", name])
        wait_watching(node, name)
    kill(node, "clean1", "clean2")
    wait_verdict(node, "clean1")
    mark_user_shutdown(node, "clean1")
    node.run(["brine", "watcher", "cleanup"])
    assert info(node, "clean1")["admin_state"] == "down"
    assert info(node, "clean2")["status"] == "ERROR_down"
    assert tries(node) == {}


def test_the_timer_fires_by_itself(node: Node) -> None:
    often = "[Timer]\nOnCalendar=\nOnCalendar=*:*:0/3\nRandomizedDelaySec=0\nAccuracySec=100ms\n"
    boot_idle(node, "web1")
    node.write(f"{UNITS}/{TIMER}.d/often.conf", often)
    node.run(["systemctl", "daemon-reload"])
    node.run(["systemctl", "start", TIMER])
    node.run(["systemctl", "stop", ENDED])  # which would be faster
    try:
        pid = info(node, "web1")["pid"]
        node.shell(f"kill -KILL {pid}")
        found = wait_status(node, "web1", "running")
        wait_for("another process", lambda: info(node, "web1")["pid"] not in (None, 0, pid))
        assert found
        service = ["systemctl", "show", "--property=Result", "--value", "brine-watcher.service"]
        assert node.run(service).stdout.strip() == "success"
    finally:
        node.run(["systemctl", "stop", TIMER])
    assert told(node, "web1")[-1] == "restart-tried"
    # Told once: by the record with its fields, and not by what the command prints.
    lines = node.journal("_SYSTEMD_UNIT=brine-watcher.service", "_TRANSPORT=stdout")
    assert not [one["MESSAGE"] for one in lines if "web1" in one["MESSAGE"]]


def give_timer_that_never_comes(node: Node) -> None:
    """Have the timer make no pass, so that only ended instances are a reason for one."""
    never = "[Timer]\nOnCalendar=\nOnCalendar=2099-01-01\n"
    node.write(f"{UNITS}/{TIMER}.d/never.conf", never)
    node.run(["systemctl", "daemon-reload"])


def test_a_poweroff_is_noted_without_the_timer(node: Node) -> None:
    give_timer_that_never_comes(node)
    boot(node, "user7")
    wait_watching(node, "user7")
    node.run(["systemctl", "start", TIMER])
    try:
        order(node, "user7", "poweroff")
        wait_for("the event for the cluster", lambda: outbox(node), timeout_s=60)
    finally:
        node.run(["systemctl", "stop", TIMER])
    found = info(node, "user7")
    assert (found["admin_state"], found["admin_state_source"]) == ("down", "user")
    assert [event["name"] for event in outbox(node)] == ["user7"]


def test_a_crash_is_mended_without_the_timer(node: Node) -> None:
    give_timer_that_never_comes(node)
    define(node, "panic7")
    define(node, "kill7", **IDLE)
    define_copies(node, "kill7", ["term7", "off7", "loop7"])
    names = ("panic7", "kill7", "term7", "off7", "loop7")
    for name in names:
        start(node, name) if name == "panic7" else node.run(["brine", "instance", "start", name])
        wait_watching(node, name)
    before = {name: invocation(node, name) for name in names}
    node.run(["systemctl", "start", TIMER])
    try:
        # The signals come while another pass is in progress.
        with held_lock(node):
            order(node, "panic7", "crash")
            for name, signal in (("kill7", "KILL"), ("term7", "TERM"), ("loop7", "KILL")):
                unit = f"brine-instance@{name}"
                node.run(["systemctl", "kill", "--kill-whom=main", f"--signal={signal}", unit])
            node.run(["brine", "instance", "stop", "--force", "off7"])
            for name in ("panic7", "kill7", "term7", "loop7"):
                wait_for("another run", lambda name=name: invocation(node, name) != before[name])  # type: ignore[misc]
                wait_status(node, name, "running")
                assert tries(node)[name]["count"] == 1, name
                assert told(node, name) == ["restart-tried"], name
        # A second crash waits, as it does with the timer alone.
        kill(node, "loop7")
        run = invocation(node, "loop7")
        kill(node, "kill7")
        ended = ["systemctl", "is-active", "brine-watcher-ended.service"]
        folder = node.path("/run/brine/ended")
        wait_for(
            "all that ended to be looked at",
            lambda: (
                not list(folder.iterdir())
                and node.run(ended, check=False).stdout.strip() == "inactive"
            ),
        )
        assert invocation(node, "loop7") == run
        assert tries(node)["loop7"]["count"] == 1
        assert info(node, "off7")["status"] == "ADMIN_down"
    finally:
        node.run(["systemctl", "stop", TIMER])
    assert node.run(["systemctl", "is-active", ENDED], check=False).stdout.strip() == "inactive"


KILLS = {
    "systemctl": "systemctl kill --signal=KILL {unit}",
    # As systemd-oomd does, and again, so that no step of the unit comes to its end.
    "cgroup": "while [ -e {cgroup}/cgroup.kill ] && systemctl is-active --quiet {unit}"
    " || systemctl status {unit} | grep -q deactivating; do"
    " echo 1 2>/dev/null >{cgroup}/cgroup.kill || true; done",
}


@pytest.mark.both_releases
@pytest.mark.parametrize("way", list(KILLS))
def test_a_unit_whose_last_step_is_killed_with_it_is_mended_without_the_timer(
    node: Node, way: str
) -> None:
    give_timer_that_never_comes(node)
    boot_idle(node, "kill8")
    before = invocation(node, "kill8")
    node.run(["systemctl", "start", TIMER])
    try:
        unit = "brine-instance@kill8.service"
        show = ["systemctl", "show", "--property=ControlGroup", "--value", unit]
        cgroup = f"/sys/fs/cgroup{node.run(show).stdout.strip()}"
        node.shell(KILLS[way].format(unit=unit, cgroup=cgroup))
        wait_for("another run", lambda: invocation(node, "kill8") != before)
        wait_status(node, "kill8", "running")
        assert tries(node)["kill8"]["count"] == 1
    finally:
        node.run(["systemctl", "stop", TIMER])


DEAD_STORAGE = """
import ctypes, os, stat, sys
os.mknod("/dev/fuse", 0o600 | stat.S_IFCHR, os.makedev(10, 229))
fuse = os.open("/dev/fuse", os.O_RDWR)
os.makedirs("/srv/dead", exist_ok=True)
libc = ctypes.CDLL(None, use_errno=True)
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
if libc.mount(b"dead", b"/srv/dead", b"fuse.dead", 0, options):
    raise OSError(ctypes.get_errno(), "mount")
print("mounted", flush=True)
sys.stdin.read()
libc.umount2(b"/srv/dead", 2)
os.unlink("/dev/fuse")
"""


@contextmanager
def dead_storage(node: Node) -> Iterator[None]:
    """Have a file system at /srv/dead that answers nothing: whoever touches it waits for ever."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(node.command(["python3", "-c", DEAD_STORAGE]), **pipes) as server:
        assert server.stdout
        assert server.stdout.readline() == b"mounted\n"
        yield
        assert server.stdin
        server.stdin.close()


def test_forty_starts_that_hang_hold_up_nobody(node: Node) -> None:
    good = [f"good{number}" for number in range(3)]
    dead = [f"dead{number:02}" for number in range(40)]
    define(node, "good0", admin_state="up", **IDLE)
    define_copies(node, "good0", [*good[1:], *dead])
    for name in dead:
        file = f"/var/lib/brine/instances/{name}.json"
        disk = {"path": "/srv/dead/disk", "uuid": info(node, name)["uuid"]}
        spec = {**json.loads(node.read(file)), "disks": [disk], "start_order": 0}
        node.write(file, json.dumps(spec))
    with dead_storage(node):
        try:
            node.run(["systemctl", "start", "--no-block", "brine-instances.service"])
            for name in good:
                wait_status(node, name, "running")
            found = node.journal("BRINE_EVENT=start-asked")
            asked = [one["BRINE_INSTANCE"] for one in found if one["BRINE_INSTANCE"] in good + dead]
            assert set(asked[:4]) < set(dead)
            assert set(asked[4:7]) == set(good)
            # The watcher looks after the others meanwhile, and leaves alone whose turn comes.
            assert node.run(["systemctl", "is-active", "brine-instances"], check=False).stdout == (
                "activating\n"
            )
            kill(node, "good1")
            made = passed(node)
            assert made["good1"]["actions"] == ["try"]
            assert {tuple(made[name]["actions"]) for name in dead} == {()}
            assert info(node, "good1")["status"] == "running"
            # One that is ended does not wait for that storage. The kernel lets one process look a
            # name up, and has the others wait for that one: so all are ended.
            node.run(["systemctl", "stop", "brine-instances.service"])
            busy = "systemctl list-units --no-legend --state=activating,deactivating"
            wait_for(
                "their units to end",
                lambda: (
                    not node.shell(
                        "systemctl kill --kill-whom=main --signal=KILL 'brine-instance@dead*' || :;"
                        f"sleep 1; {busy} 'brine-instance@dead*'"
                    )
                ),
                timeout_s=120,
            )
        finally:
            node.run(["systemctl", "stop", "brine-instances.service"])
            node.shell("systemctl kill --signal=KILL 'brine-instance@dead*'")


@contextmanager
def held_lock(node: Node) -> Iterator[None]:
    """Have a pass be in progress meanwhile."""
    file = "/run/lock/brine/watcher.lock"
    with subprocess.Popen(node.command(["flock", file, "cat"]), stdin=subprocess.PIPE) as holder:
        wait_for(
            "the lock", lambda: node.run(["flock", "-n", file, "true"], check=False).returncode
        )
        try:
            yield
        finally:
            assert holder.stdin
            holder.stdin.close()


AT_ONCE = 10


@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=pytest.mark.long)])
def test_a_pass_never_starts_what_an_admin_is_stopping(node: Node, rounds: int) -> None:
    """Ten stops a round, while one pass comes after another. Half of the guests crash just then."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    names = [f"web{number}" for number in range(AT_ONCE)]
    node.write("/etc/brine/watcher.toml", "tries = 1000\ninterval = 1\n")
    define(node, names[0], **IDLE)
    define_copies(node, names[0], names[1:])
    with passes(node) as made, ThreadPoolExecutor(AT_ONCE) as pool:
        for number in range(rounds):
            list(pool.map(lambda name: node.run(["brine", "instance", "start", name]), names))
            delays = {name: rng.uniform(0, 1.5) for name in names}
            crash = set(rng.sample(names, AT_ONCE // 2))

            def stop(name: str, delays: dict[str, float] = delays, crash: set[str] = crash) -> None:
                time.sleep(delays[name])
                if name in crash:
                    node.shell(f"systemctl kill --signal=KILL brine-instance@{name} || :")
                node.run(["brine", "instance", "stop", "--force", "--timeout", "0.3", name])

            list(pool.map(stop, names))
            stopped = {name: invocation(node, name) for name in names}
            wait_for_passes(made, 2)
            where = f"seed {seed}, round {number}: {delays}, of which {sorted(crash)} crashed"
            assert set(statuses(node).values()) == {"ADMIN_down"}, where
            assert {name: invocation(node, name) for name in names} == stopped, where
    assert set(made) <= {0, 1, 3}


@contextmanager
def passes(node: Node) -> Iterator[list[int]]:
    """Make one pass after another meanwhile; yields the exit statuses of those that are over."""
    made: list[int] = []
    enough = threading.Event()

    def make() -> None:
        while not enough.is_set():
            done = node.run(["brine", "watcher", "run"], check=False, timeout_s=120)
            assert "Traceback" not in done.stderr
            made.append(done.returncode)

    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        work = pool.submit(make)
        stack.callback(enough.set)
        yield made
    work.result()


def wait_for_passes(made: list[int], count: int) -> None:
    """Wait until so many more are over."""
    enough = len(made) + count
    wait_for("more passes", lambda: len(made) >= enough, timeout_s=60)


def statuses(node: Node) -> dict[str, str]:
    """The state of each instance, with its desired state."""
    listed = json.loads(node.run(["brine", "instance", "list", "--json"]).stdout)
    return {one["name"]: one["status"] for one in listed}


KILLED = """
import os, signal, sys

last = int(sys.argv[1])
steps = 0
changes = ("os.rename", "os.remove", "os.mkdir", "subprocess.Popen", "fcntl.flock")


def step(event, arguments):
    global steps
    is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
    if event in changes or is_write:
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(step)
sys.argv = ["brine", "watcher", "run"]
from brine.common.cli import main
main()
"""
"""A pass that is killed just before it changes something for the so-manieth time."""


def test_killed_at_each_step_the_next_pass_ends_right(node: Node, release: str) -> None:
    node.write("/srv/killed.py", KILLED)
    node.write("/etc/brine/watcher.toml", "parallel = 1\n")
    names = ["crash1", "again1", "user1"]
    for name in names:
        again = "restart" if name == "again1" else "stop"
        define(node, name, user_shutdown=again, **IDLE)
    for name in names:
        node.run(["brine", "instance", "start", name])
    specs = {name: node.read(f"/var/lib/brine/instances/{name}.json") for name in names}
    # It would take a killed guest's mark away, which here stands for its user's shutdown.
    node.run(["systemctl", "stop", "brine-kvmd.path", "brine-kvmd.service"])
    # Each release has every second step.
    first = 1 if release == "bookworm" else 2
    running, steps = names, 0
    for step in range(first, 200, 2):
        node.shell("rm -rf /var/lib/brine/watcher.json /var/lib/brine/outbox")
        kill(node, *running)
        node.write("/var/lib/brine/instances/user1.json", specs["user1"])
        for name in ("again1", "user1"):
            mark_user_shutdown(node, name)
        done = node.run(["python3", "/srv/killed.py", str(step)], check=False)
        if node.path(RECORD).exists():
            let_pass(node, 300)
        found = node.run(["brine", "watcher", "run"], check=False)
        where = f"killed at step {step}: {done.stderr}{found.stdout}{found.stderr}"
        assert found.returncode == 0, where
        running = ["crash1", "again1"]
        # One that was just being started is left alone, and comes up.
        right = {"crash1": "running", "again1": "running", "user1": "USER_down"}
        wait_for(where, lambda: statuses(node) == right)  # noqa: B023
        user = json.loads(node.read("/var/lib/brine/instances/user1.json"))
        assert (user["admin_state"], user["admin_state_source"]) == ("down", "user"), where
        assert [event["name"] for event in outbox(node)] == ["user1"], where
        record = json.loads(node.read(RECORD))["instances"]
        assert record.keys() == {"crash1"}, where
        assert 1 <= record["crash1"]["count"] <= 2, where
        if done.returncode == 0:
            break
        assert done.returncode in (-9, 137), where
        steps += 1
    else:
        pytest.fail("no pass came to its end")
    assert steps >= 10
    node.run(["systemctl", "start", "brine-kvmd.path"])


def test_a_reboot_loses_nothing(release: str, packages: list[Path]) -> None:
    with node_with_watcher(release, packages, keeps_files=True) as node:
        define(node, "user1")
        define(node, "web1", **IDLE)
        define(node, "web2", **IDLE)
        start(node, "user1")
        for name in ("web1", "web2"):
            node.run(["brine", "instance", "start", name])
        wait_watching(node, "user1")
        order(node, "user1", "poweroff")
        wait_status(node, "user1", "USER_down")
        kill(node, "web1", "web2")
        passed(node)
        (event,) = outbox(node)
        before = tries(node)
        assert before.keys() == {"web1", "web2"}
        node.run(["brine", "watcher", "pause", "2h"])

        node.reboot(timeout_s=300)

        assert outbox(node) == [event]
        assert tries(node) == before
        assert "paused until" in node.run(["brine", "watcher", "status"]).stdout
        assert {info(node, name)["status"] for name in ("web1", "web2")} == {"running"}
        assert info(node, "user1")["admin_state"] == "down"
        assert json.loads(node.read(RECORD))["version"] == 1


_FULL = Path("/srv/full")


@contextmanager
def full_storage(node: Node) -> Iterator[Path]:
    """A sparse disk of a file system that has hardly any room; the file's removal makes room."""
    node.shell(f"mkdir -p {_FULL}; mount -t tmpfs -o size=48m tmpfs {_FULL}")
    node.shell(f"truncate -s 256M {_FULL}/disk; head -c 44M /dev/zero >{_FULL}/ballast")
    try:
        yield _FULL / "ballast"
    finally:
        node.shell(f"umount --lazy {_FULL}")


def wait_halted(node: Node, name: str, state: str) -> dict[str, Any]:
    """Wait until a list says that QEMU has stopped an instance."""

    def halted() -> dict[str, Any] | None:
        rows = json.loads(node.run(["brine", "instance", "list", "--json"]).stdout)
        (one,) = (row for row in rows if row["name"] == name)
        return one if (one["halted"] or {}).get("state") == state else None

    return wait_for(f"{name} to stand still: {state}", halted, timeout_s=180)


def write_more_than_fits(node: Node, name: str) -> None:
    run_in_guest(
        node, name, "dd if=/dev/zero of=/dev/vda bs=1M count=16 conv=fsync >/dev/null 2>&1 &"
    )


@pytest.mark.both_releases
def test_a_full_disk_is_said_and_the_guest_goes_on_once_there_is_room(node: Node) -> None:
    disk = {"path": f"{_FULL}/disk", "format": "raw"}
    with full_storage(node) as ballast:
        boot(node, "full1", disks=[disk])
        wait_watching(node, "full1")
        write_more_than_fits(node, "full1")
        one = wait_halted(node, "full1", "io-error")
        assert (one["status"], one["oper_state"], one["paused"]) == (
            "ERROR_halted",
            "running",
            False,
        )
        assert one["halted"]["reason"] == "No space left on device"
        assert f"{_FULL}/disk" in one["why"]
        listed = node.run(["brine", "instance", "list"]).stdout
        assert "ERROR_halted (io-error)" in listed
        found = info(node, "full1")
        assert (found["status"], found["qemu"]) == ("ERROR_halted", "io-error")
        # What can't be done says so.
        for verb in ("resume", "pause"):
            done = node.run(["brine", "instance", verb, "full1"], check=False)
            assert done.returncode == 1, done.stdout
            assert "io-error" in done.stderr
        # The watcher reports it as long as there is no room, and continues it then.
        assert passed(node, status=3)["full1"]["actions"] == []
        assert "odd" in told(node, "full1")
        node.run(["rm", str(ballast)])
        assert passed(node)["full1"]["actions"] == ["continue"]
        wait_status(node, "full1", "running")
        wait_for("no halt", lambda: info(node, "full1")["halted"] is None, timeout_s=60)
        assert told(node, "full1")[-1] == "continued"
        said = node.shell("journalctl -o cat BRINE_EVENT=halted BRINE_INSTANCE=full1")
        assert "QEMU has stopped it: io-error, No space left on device" in said
        run_in_guest(node, "full1", "true")


@pytest.mark.parametrize("by_systemd", [False, True])
def test_a_guest_with_a_full_disk_is_continued_by_its_stop(node: Node, *, by_systemd: bool) -> None:
    disk = {"path": f"{_FULL}/disk", "format": "raw"}
    with full_storage(node) as ballast:
        boot(node, "full2", disks=[disk], shutdown_timeout=300)
        wait_watching(node, "full2")
        write_more_than_fits(node, "full2")
        wait_halted(node, "full2", "io-error")
        node.run(["rm", str(ballast)])
        if by_systemd:
            node.run(["systemctl", "stop", "brine-instance@full2"], timeout_s=200)
        else:
            node.run(["brine", "instance", "stop", "full2"], timeout_s=200)
        said = node.shell("journalctl -o cat BRINE_EVENT=ended BRINE_INSTANCE=full2")
        assert said == ""  # it has shut down by itself


@pytest.mark.both_releases
def test_a_suspended_guest_is_woken_and_a_panicked_one_is_not_waited_for(node: Node) -> None:
    boot(node, "asleep1", extra_arguments=["-device", "pvpanic-pci", "-action", "panic=pause"])
    wait_watching(node, "asleep1")
    suspend = "(sleep 1; echo mem >/sys/power/state) >/dev/null 2>&1 &"
    run_in_guest(node, "asleep1", suspend)
    one = wait_halted(node, "asleep1", "suspended")
    assert one["status"] == "running"
    assert "running (suspended)" in node.run(["brine", "instance", "list"]).stdout
    node.run(["brine", "instance", "resume", "asleep1"])
    wait_for("no halt", lambda: info(node, "asleep1")["halted"] is None, timeout_s=60)
    run_in_guest(node, "asleep1", suspend)
    wait_halted(node, "asleep1", "suspended")
    node.run(["brine", "instance", "stop", "asleep1"], timeout_s=200)
    start(node, "asleep1")

    def panics() -> bool:
        # It stands still if nobody reads what it says; and the emulated line may lose the order.
        with serial_line(node, "asleep1") as line, suppress(TimeoutError):
            line.settimeout(3)
            line.sendall(b"\ncrash\n")
            while line.recv(4096):
                pass
        return bool(info(node, "asleep1")["qemu"] == "guest-panicked")

    wait_for("asleep1 to panic", panics, timeout_s=180)
    wait_halted(node, "asleep1", "guest-panicked")
    done = node.run(["brine", "instance", "stop", "asleep1"], check=False)
    assert done.returncode == 1
    assert "its guest has panicked" in done.stderr
    # With the reset button it begins anew.
    node.run(["brine", "instance", "reboot", "--reset", "asleep1"])
    wait_ready(node, "asleep1")
    found = info(node, "asleep1")
    assert (found["qemu"], found["halted"]) == ("running", None)


LVM = """#!/bin/sh
LD_LIBRARY_PATH=/opt/lvm /opt/lvm/lvm "$@"
status=$?
echo "$(basename "$(cat /proc/self/cgroup)") $1 $status" >> /run/lvm-runs
exit "$status"
"""
"""Notes of each run of LVM the unit that it is in, its command, and its status."""


def give_lvm(node: Node) -> None:
    """Have the node have this host's LVM. The node can download none."""
    program = shutil.which("lvm", path="/usr/sbin:/sbin") or ""
    listed = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    node.put(Path(program), "/opt/lvm/lvm")
    for library in re.findall(r"=> (\S+)", listed):
        if not re.match(r"lib(c|m)\.", Path(library).name):
            node.put(Path(library).resolve(), f"/opt/lvm/{Path(library).name}")
    node.write("/usr/sbin/lvm", LVM, mode=0o755)
    node.run(["mkdir", "-p", "/etc/lvm"])


def test_what_happens_to_volumes_is_told_once(node: Node) -> None:
    """LVM and folders, as the sandboxes of the watcher and of an instance's unit let them be
    seen."""
    unit, settings = "/srv/vms", "/etc/brine/storage.toml"
    give_lvm(node)
    node.shell(f"mkdir -p {unit} && chmod 0750 {unit} && mkdir -p /etc/brine")
    node.write(Path(settings), f'directories = ["{unit}"]\ndefault_unit = "{unit}"\n')
    define(node, "vol1", admin_state="down", disks=[{"name": "data", "size_mib": 16}])
    # What its volume group was in is gone.
    folder = Path("/var/lib/brine/instances")
    spec = json.loads(node.read(folder / "vol1.json"))
    (disk,) = spec["disks"]
    file, group = disk["path"], f"/dev/vg1/brine-{uuid.uuid4()}"
    gone = {**disk, "uuid": group[-36:], "unit": "vg1", "path": group}
    other = {**spec, "name": "vol2", "uuid": str(uuid.uuid4()), "disks": [gone]}
    node.write(folder / "vol2.json", json.dumps(other))

    def pass_of_unit() -> tuple[list[str], list[str]]:
        node.run(["systemctl", "start", "brine-watcher.service"], timeout_s=120)
        return told(node, "vol1"), told(node, "vol2")

    try:
        assert pass_of_unit() == ([], ["volume-degraded"])
        found = json.loads(node.run(["brine", "instance", "list", "--json"]).stdout)
        states = {
            one["name"]: (one["volumes"][0]["status"], one["volumes"][0]["why"]) for one in found
        }
        assert states["vol1"] == ("ok", "")
        assert states["vol2"] == ("missing", "there is no volume group vg1")
        failed = node.run(["brine", "instance", "start", "vol2"], check=False)
        assert failed.returncode == 1
        assert "its disk data in vg1 is missing: there is no volume group vg1" in failed.stderr
        assert "brine disk status vol2" in failed.stderr
        node.run(["brine", "instance", "stop", "vol2"])

        node.run(["mv", file, f"{file}.away"])
        assert pass_of_unit() == (["volume-degraded"], ["volume-degraded"])
        assert pass_of_unit() == (["volume-degraded"], ["volume-degraded"])
        node.run(["mv", f"{file}.away", file])
        assert pass_of_unit() == (["volume-degraded", "volume-recovered"], ["volume-degraded"])
        runs = {tuple(line.split()) for line in node.read("/run/lvm-runs").splitlines()}
        units = ("brine-watcher.service", "brine-instance@vol2.service")
        assert {(each, "lvs", "0") for each in units} <= runs
        assert {status for _, _, status in runs} == {"0"}
    finally:
        node.shell(f"rm -rf {unit} {settings} /opt/lvm /usr/sbin/lvm /run/lvm-runs")
        node.shell("rm -f /var/lib/brine/watcher-volumes.json")
