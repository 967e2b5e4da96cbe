"""Instances on real nodes of both releases: with QEMU 7.2, and with QEMU 10.0."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from brine.vm.spec import NOT_CONFINED
from lab.command import CommandError
from lab.node import Node
from lab.qcow2 import make_hostile_qcow2, make_qcow2
from lab.waiting import wait_for
from lab.walks import walk
from node.instance_on_node import (
    DISKS,
    GUEST,
    IDLE,
    SMALLEST,
    boot,
    boot_idle,
    command_line,
    define,
    define_copies,
    info,
    left_of,
    node_with_instances,
    option,
    order,
    qmp,
    run_in_guest,
    serial_line,
    start,
    wait_ready,
    wait_status,
)
from node.kvmd_on_node import wait_verdict, wait_watching

_NEVER = """
[Service]
Type=oneshot
ExecStart=sleep infinity
"""


@pytest.fixture(scope="module")
def node(release: str, packages: list[Path]) -> Iterator[Node]:
    with node_with_instances(release, packages) as node:
        yield node


@pytest.fixture(autouse=True)
def nothing_runs(node: Node) -> Iterator[None]:
    """Each story begins and ends without instances."""
    yield
    node.shell("systemctl kill --signal=KILL 'brine-instance@*' 2>/dev/null || :")
    node.shell("systemctl stop 'brine-instance@*'; systemctl reset-failed")
    node.shell("rm -f /var/lib/brine/instances/*.json /var/lib/brine/runtime/*.json")
    node.shell("rm -f /run/brine/ctrl/* /run/brine/marks/* /etc/brine/instance.toml")


def refused(node: Node, *arguments: str) -> str:
    """The error of `brine instance`: one line and perhaps a hint."""
    with pytest.raises(CommandError) as caught:
        node.run(["brine", "instance", *arguments])
    assert caught.value.returncode in (1, 2)
    assert "Traceback" not in caught.value.stderr
    return caught.value.stderr


@pytest.mark.both_releases
def test_an_instance_runs_as_a_unit_whose_process_is_qemu(node: Node) -> None:
    define(node, "web1")
    assert info(node, "web1")["status"] == "ADMIN_down"
    start(node, "web1")
    found = wait_status(node, "web1", "running")
    assert (found["admin_state"], found["oper_state"], found["qemu"]) == (
        "up",
        "running",
        "running",
    )
    group = node.run(["cat", f"/proc/{found['pid']}/cgroup"]).stdout
    assert group.strip().endswith("/machine.slice/brine-instance@web1.service")
    processes = node.shell(f"cat /sys/fs/cgroup{group.strip().partition('::')[2]}/cgroup.procs")
    assert processes.split() == [str(found["pid"])]
    assert os.path.basename(command_line(node, "web1")[0]).startswith("qemu-system")
    assert info(node, "web1")["why"] == ""


_DOMAIN = """
<domain type="qemu">
  <name>sql1</name><memory unit="MiB">64</memory><vcpu current="2">8</vcpu>
  <os><type arch="x86_64" machine="pc-q35-rhel8.6.0">hvm</type></os>
  <features><acpi/></features>
  <cpu mode="custom"><model>qemu64</model><topology sockets="4" dies="1" cores="2" threads="1"/>
    <feature policy="require" name="pclmuldq"/><feature policy="disable" name="x2apic"/></cpu>
  <devices>
    <emulator>/srv/theirs/qemu</emulator>
    <disk type="file" device="disk"><driver name="qemu" type="raw" io="native"/>
      <source file="/srv/sql1.img"/><target dev="sda" bus="sata"/><readonly/>
      <serial>6d0a9c56-6d8e-4b3c-9d5e-7a3c55b0e1bb</serial></disk>
    <graphics type="vnc" socket="/run/sql1.vnc"/>
  </devices>
</domain>
"""
_MACHINE = """
name: mail1
cpu: x86-64-v2-AES,flags=-pcid
kvm: 0
memory: 64
cores: 2
scsi0: local:7/vm-7-disk-0.raw,ro=1
serial0: socket
"""


@pytest.mark.both_releases
def test_machines_of_other_programs_run(node: Node) -> None:
    node.shell("mkdir -p /var/lib/vz/images/7; truncate -s 1M /var/lib/vz/images/7/vm-7-disk-0.raw")
    node.shell("truncate -s 1M /srv/sql1.img")
    node.write("/srv/sql1.xml", _DOMAIN)
    node.write("/srv/7.conf", _MACHINE)
    said = node.run(["brine", "instance", "import", "--libvirt", "/srv/sql1.xml"]).stderr
    assert "devices/emulator /srv/theirs/qemu" in said
    node.run(["brine", "instance", "import", "--proxmox", "/srv/7.conf"])
    node.run(["brine", "instance", "start", "sql1", "mail1"])
    for name in ("sql1", "mail1"):
        wait_status(node, name, "running")
    (processor,) = option(command_line(node, "sql1"), "-cpu")
    assert processor == "qemu64,+pclmulqdq,-x2apic"
    assert qmp(node, "sql1", "query-vnc")["service"] == "/run/sql1.vnc"
    assert len(qmp(node, "mail1", "query-cpus-fast")) == 2


@pytest.mark.both_releases
def test_every_way_to_stop_it_is_the_admins(node: Node) -> None:
    ways = {
        "command": ["brine", "instance", "stop", "stop1"],
        "systemctl": ["systemctl", "stop", "brine-instance@stop1"],
    }
    define(node, "stop1")
    for count, way in enumerate(ways.values(), 1):
        start(node, "stop1")
        wait_watching(node, "stop1", times=count)
        node.run(way)
        assert wait_verdict(node, "stop1", times=count)[0] == "admin"
        assert left_of(node, "stop1") == {}
    assert wait_status(node, "stop1", "ERROR_down")["admin_state"] == "up"


@pytest.mark.both_releases
def test_what_its_user_shuts_down_stays_off_and_is_told(node: Node) -> None:
    boot(node, "shut1")
    wait_watching(node, "shut1")
    order(node, "shut1", "poweroff")
    found = wait_status(node, "shut1", "USER_down")
    assert (found["oper_state"], found["admin_state"]) == ("S", "up")
    assert "should be up but was shut down by its user" in found["why"]
    start(node, "shut1")
    assert info(node, "shut1")["status"] == "running"


@pytest.mark.both_releases
def test_a_crash_is_an_error_and_start_repairs_it(node: Node) -> None:
    boot(node, "crash1", nics=[{"link": "br0"}])
    wait_watching(node, "crash1")
    node.shell(f"kill -KILL {info(node, 'crash1')['pid']}")
    found = wait_status(node, "crash1", "ERROR_down")
    assert "signal 9" in found["why"]
    wait_for("nothing to be left", lambda: left_of(node, "crash1") == {})
    start(node, "crash1")
    assert info(node, "crash1")["status"] == "running"


# What a program that has broken out into QEMU can do with the tap that QEMU has.
_PERSIST = """
import ctypes, fcntl, os, sys
libc = ctypes.CDLL(None, use_errno=True)
process = os.pidfd_open(int(sys.argv[1]))
for number in os.listdir(f"/proc/{sys.argv[1]}/fd"):
    if os.readlink(f"/proc/{sys.argv[1]}/fd/{number}") == "/dev/net/tun":
        taken = libc.syscall(438, process, int(number), 0)  # pidfd_getfd(2)
        fcntl.ioctl(taken, 0x400454CB, 1)  # TUNSETPERSIST
        print("persistent")
"""


def test_a_tap_that_its_qemu_makes_persistent_ends_with_it(node: Node) -> None:
    def taps() -> str:
        return node.shell("ip -o link show | grep -c vm-tap1- || :").strip()

    boot(node, "tap1", nics=[{"link": "br0"}])
    for clears in (True, False):
        pid = str(info(node, "tap1")["pid"])
        assert node.run(["python3", "-c", _PERSIST, pid]).stdout == "persistent\n"
        if not clears:  # as if the clean-up were killed
            node.shell("mv /run/brine/taps /run/brine/taps.away")
        node.run(["brine", "instance", "stop", "--force", "--timeout", "1", "tap1"])
        assert taps() == ("0" if clears else "1")
        node.run(["brine", "instance", "start", "tap1"])
        assert taps() == "1"


@pytest.mark.both_releases
def test_a_guest_that_panics_has_crashed(node: Node) -> None:
    boot(node, "panic1")
    wait_watching(node, "panic1")
    order(node, "panic1", "crash")
    assert wait_verdict(node, "panic1")[0] == "crash"
    found = wait_status(node, "panic1", "ERROR_down")
    assert found["why"] == f"it should be up but is down: it crashed ({found['verdict']['cause']})"
    (listed,) = json.loads(node.run(["brine", "instance", "list", "--json"]).stdout)
    assert listed["why"] == found["why"]
    wait_for("its last words", lambda: "Kernel panic" in str(info(node, "panic1")["last_words"]))
    node.shell("id reader || useradd --groups brine reader; id nobody")
    log = ["brine", "instance", "log", "panic1"]
    assert as_user(node, "reader", *log) == 0
    assert as_user(node, "nobody", *log) != 0
    said = node.run(log).stdout
    assert "guest: " in said  # the emulated line may lose a character of each line
    assert "Kernel panic" in said
    node.run(["brine", "instance", "undefine", "panic1"])
    assert node.shell("ls /run/brine/console /var/log/brine/console | grep panic1 || :") == ""


def test_the_log_of_its_console_goes_on_after_its_reader_ended(node: Node) -> None:
    boot(node, "log1")
    pid = info(node, "log1")["pid"]
    descriptors = node.shell(f"ls -l /proc/{pid}/fd; stat -c %F /run/brine/console/log1")
    assert "/run/brine/console/log1" in descriptors
    assert descriptors.endswith("fifo\n")
    node.shell("systemctl kill --signal=KILL brine-console-log")

    def is_logged() -> bool:
        with serial_line(node, "log1") as line:
            line.settimeout(60)
            line.sendall(b"\nsay again\n")
            heard = b""
            while b"no such order: say again" not in heard:
                heard += line.recv(4096)
        return "no such order: say again" in node.run(["brine", "instance", "log", "log1"]).stdout

    wait_for("the next reader", is_logged, timeout_s=60)
    assert info(node, "log1")["pid"] == pid


def test_what_runs_and_should_not_is_told(node: Node) -> None:
    define(node, "web1")
    node.run(["systemctl", "start", "brine-instance@web1"])
    found = wait_status(node, "web1", "ERROR_up")
    assert "should be down" in found["why"]


def test_what_is_offline_is_not_started(node: Node) -> None:
    define(node, "web1", admin_state="offline")
    assert info(node, "web1")["status"] == "ADMIN_offline"
    assert "is offline" in refused(node, "start", "web1")


def test_a_guest_that_does_not_listen_runs_on_unless_forced(node: Node) -> None:
    # Without ACPI nobody hears of the power button.
    boot(node, "web1", acpi=False)
    text = refused(node, "stop", "--timeout", "1", "web1")
    assert "did not shut down within 1 s, and runs on" in text
    found = info(node, "web1")
    assert (found["status"], found["qemu"]) == ("ERROR_up", "running")
    node.run(["brine", "instance", "stop", "--timeout", "1", "--force", "web1"])
    assert info(node, "web1")["status"] == "ADMIN_down"
    assert left_of(node, "web1") == {}


@pytest.mark.parametrize("way", ["brine instance stop web1", "systemctl stop brine-instance@web1"])
def test_while_it_is_being_stopped_it_is_not_started(node: Node, way: str) -> None:
    boot_idle(node, "web1", acpi=False, shutdown_timeout=60)
    node.shell(f"{way} >/srv/stop.log 2>&1 & echo $! >/srv/stop.pid")
    wait_status(node, "web1", "stopping")
    before = node.read("/var/lib/brine/instances/web1.json")
    assert "web1: is just being stopped" in refused(node, "start", "web1")
    assert node.read("/var/lib/brine/instances/web1.json") == before
    node.run(["brine", "instance", "stop", "--force", "--timeout", "1", "web1"])
    assert info(node, "web1")["status"] == "ADMIN_down"
    node.shell("tail --pid $(cat /srv/stop.pid) --follow /dev/null")


def test_several_are_started_and_stopped_side_by_side(node: Node) -> None:
    boot_idle(node, "web1", acpi=False, shutdown_timeout=600)
    for name in ("web2", "web3"):
        define(node, name)
    command = ["brine", "instance", "start", "web3", "web2", "--json"]
    started = json.loads(node.run(command).stdout)["instances"]
    assert [(one["name"], one["status"]) for one in started] == [
        ("web3", "running"),
        ("web2", "running"),
    ]
    for name in ("web2", "web3"):
        wait_ready(node, name)
    # The first one holds up neither of the others.
    stop = "brine instance stop web1 web2 web3 --json"
    node.shell(f"{stop} >/srv/stop.json 2>/srv/stop.log & echo $! >/srv/stop.pid")
    for name in ("web2", "web3"):
        wait_status(node, name, "ADMIN_down")
    assert info(node, "web1")["status"] == "stopping"
    qmp(node, "web1", "quit")
    node.shell("tail --pid $(cat /srv/stop.pid) --follow /dev/null")
    found = json.loads(node.read("/srv/stop.json"))["instances"]
    assert [(one["name"], one["changed"], one["status"]) for one in found] == [
        (name, True, "ADMIN_down") for name in ("web1", "web2", "web3")
    ]


def test_who_gives_up_waiting_is_told_what_holds(node: Node) -> None:
    boot_idle(node, "web1", acpi=False, shutdown_timeout=60)
    # Without set -m, bash has what runs in the background ignore SIGINT.
    node.shell("set -m; brine instance stop web1 2>/srv/stop.log & echo $! >/srv/stop.pid")
    wait_status(node, "web1", "stopping")
    node.shell("kill -INT $(cat /srv/stop.pid); tail --pid $(cat /srv/stop.pid) -f /dev/null")
    assert node.read("/srv/stop.log").startswith("interrupted: web1 runs on, ")
    assert info(node, "web1")["status"] == "ERROR_up"


def test_a_start_that_comes_to_no_end_can_be_stopped(node: Node) -> None:
    deaf = "#!/bin/sh\ntrap '' TERM\nexec sleep 600\n"
    node.write("/srv/deaf", deaf, mode=0o755)
    # What confines QEMU asks it for its version first, and a machine type without one does.
    define(node, "web1", qemu="/srv/deaf", machine="pc-i440fx-7.2", **NOT_CONFINED)
    node.run(["systemctl", "start", "--no-block", "brine-instance@web1"])
    wait_status(node, "web1", "starting")
    deaf_one = ["pgrep", "--full", "--exact", "sleep 600"]
    wait_for("it to be deaf", lambda: node.run(deaf_one, check=False).stdout)
    assert "did not stop within 1 s" in refused(node, "stop", "--timeout", "1", "web1")
    node.run(["brine", "instance", "stop", "--timeout", "1", "--force", "web1"])
    assert info(node, "web1")["status"] == "ADMIN_down"
    assert left_of(node, "web1") == {}


def test_a_start_that_systemd_has_not_begun_is_called_off(node: Node) -> None:
    unit = (
        "[Unit]\nBefore=brine-instance@web1.service\n[Service]\nType=oneshot\nExecStart=sleep 600\n"
    )
    node.write("/run/systemd/system/first.service", unit)
    node.run(["systemctl", "daemon-reload"])
    define(node, "web1", **IDLE)
    node.run(["systemctl", "start", "--no-block", "first"])
    node.run(["systemctl", "start", "--no-block", "brine-instance@web1"])
    assert info(node, "web1")["status"] == "starting"
    node.run(["brine", "instance", "stop", "web1"])
    assert info(node, "web1")["status"] == "ADMIN_down"
    assert "brine-instance" not in node.run(["systemctl", "list-jobs"]).stdout
    node.run(["systemctl", "stop", "first"])


@pytest.mark.parametrize("content", ["", "{"])
def test_what_runs_without_a_sound_spec_is_told_and_can_be_stopped(
    node: Node, content: str
) -> None:
    boot(node, "web1")
    if content:
        node.write("/var/lib/brine/instances/web1.json", content)
    else:
        node.run(["rm", "/var/lib/brine/instances/web1.json"])
    assert "web1: runs, and " in refused(node, "list")
    assert "web1: " in refused(node, "start", "web1")
    heard = node.run(["brine", "instance", "console", "web1"], stdin="\rhello\r\x1d").returncode
    assert heard == 0
    node.run(["brine", "instance", "stop", "web1"])
    assert left_of(node, "web1") == {}
    assert "web1: " in refused(node, "stop", "web1")


def test_who_stands_in_qemus_place_is_told_nothing(node: Node) -> None:
    boot_idle(node, "web1")
    script = (
        "import os, socket; path = '/run/brine/ctrl/web1.qmp'; os.unlink(path);"
        " one = socket.socket(socket.AF_UNIX); one.bind(path); one.listen();"
        " print('listens', flush=True);"
        " heard = open('/srv/heard', 'wb', 0)\n"
        "while True: heard.write(one.accept()[0].recv(1))"
    )
    node.shell(f'systemd-run --unit=stranger python3 -c "{script}"')
    wait_for("a stranger", lambda: "than its QEMU" in str(info(node, "web1")["qemu"]))
    assert "than its QEMU" in refused(node, "reboot", "--reset", "web1")
    node.run(["brine", "instance", "stop", "--timeout", "2", "--force", "web1"])
    assert info(node, "web1")["status"] == "ADMIN_down"
    assert node.read("/srv/heard") == ""
    node.run(["systemctl", "stop", "stranger"])


_LISTENS = """
import os, selectors, socket, sys
heard = open(sys.argv[1], "wb", 0)
selector = selectors.DefaultSelector()
for suffix in ("qmp", "serial", "agent"):
    path = f"/run/brine/ctrl/web1.{suffix}"
    os.unlink(path)
    one = socket.socket(socket.AF_UNIX)
    one.bind(path)
    one.listen()
    selector.register(one, selectors.EVENT_READ)
print("listens", flush=True)
while True:
    for key, _ in selector.select():
        heard.write(key.fileobj.accept()[0].recv(1))
"""


def test_a_users_own_unit_of_that_name_is_told_nothing(node: Node) -> None:
    node.shell("id poser || useradd --create-home --groups brine-ctrl poser")
    uid = node.run(["id", "--user", "poser"]).stdout.strip()
    define(node, "web1", vnc_bind="127.0.0.1", vnc_password_file="/srv/secret", **IDLE)
    node.write("/srv/secret", "s3cr3t-1\n", mode=0o600)
    node.write("/srv/listens.py", _LISTENS)
    node.run(["brine", "instance", "start", "web1"])
    # The node has no pam_systemd, which says so.
    drop_in = "/run/systemd/system/user@.service.d/runtime.conf"
    node.write(drop_in, "[Service]\nEnvironment=XDG_RUNTIME_DIR=/run/user/%i\n")
    node.run(["systemctl", "daemon-reload"])
    node.run(["systemctl", "start", f"user@{uid}.service"])
    run = ["env", f"XDG_RUNTIME_DIR=/run/user/{uid}", "systemd-run", "--user"]
    run += ["--unit=brine-instance@web1", "python3", "/srv/listens.py", "/home/poser/heard"]
    assert as_user(node, "poser", *run) == 0
    wait_for("a stranger", lambda: "than its QEMU" in str(info(node, "web1")["qemu"]))
    for command in (
        ["nic", "add", "web1", "--link", "br0"],
        ["nic", "list", "web1"],
        ["instance", "console", "web1"],
        ["instance", "pause", "web1"],
    ):
        with pytest.raises(CommandError, match="than its QEMU"):
            node.run(["brine", *command], stdin="password\r")
    node.run(["brine", "instance", "stop", "--timeout", "2", "--force", "web1"])
    assert node.read("/home/poser/heard") == ""
    node.run(["systemctl", "stop", f"user@{uid}.service"])


def as_user(node: Node, user: str, *command: str, stdin: str = "") -> int:
    """The exit status of a command that a user runs."""
    run = ["runuser", "--user", user, "--", *command]
    return node.run(run, stdin=stdin, check=False).returncode


def test_one_group_reads_and_another_talks_to_vms(node: Node) -> None:
    node.shell("id reader || useradd --groups brine reader; useradd --groups brine-ctrl talker")
    boot(node, "group1")
    console = ["brine", "instance", "console", "group1"]
    typed = "\rhello\r\x1d"
    spec, mark = "/var/lib/brine/instances/group1.json", "/run/brine/marks/group1.stop"
    assert as_user(node, "reader", "brine", "instance", "list") == 0
    assert as_user(node, "reader", "brine", "instance", "info", "group1") == 0
    assert as_user(node, "reader", "cat", spec) == 0
    assert as_user(node, "reader", "ls", "/run/brine/ctrl/") != 0
    assert as_user(node, "reader", *console, stdin=typed) == 1
    assert as_user(node, "talker", *console, stdin=typed) == 0
    assert as_user(node, "talker", "cat", spec) != 0
    for user in ("reader", "talker"):
        assert as_user(node, user, "touch", mark) != 0
    assert node.shell("stat -c %G /run/brine/ctrl/group1.* | sort -u") == "brine-ctrl\n"


_LEASE = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
held = []
for path in sys.argv[1:]:
    held.append(open(path, "w+"))
    fcntl.fcntl(held[-1], fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
time.sleep(600)
"""


def test_what_members_put_in_the_way_keeps_nothing_from_running(node: Node) -> None:
    """Nor does it say who has ended an instance."""
    node.shell("id talker || useradd --groups brine-ctrl talker")
    define(node, "way1")
    control = "/run/brine/ctrl/way1"
    assert as_user(node, "talker", "mkdir", "-p", f"{control}.qmp/in", f"{control}.kvmd/in") == 0
    assert as_user(node, "talker", "ln", "-s", "/etc/passwd", f"{control}.agent") == 0
    command = ["runuser", "--user", "talker", "--", "python3", "-c", _LEASE]
    places = [f"{control}.serial", f"{control}.shutdown"]
    lease = subprocess.Popen(node.command([*command, *places]), stdout=subprocess.PIPE)
    try:
        assert lease.stdout
        assert lease.stdout.readline() == b"held\n"
        start(node, "way1")
        wait_watching(node, "way1")
        assert as_user(node, "talker", "touch", f"{control}.stopping") == 0
        order(node, "way1", "poweroff")
        assert wait_verdict(node, "way1") == ("user", "guest-shutdown")
        wait_status(node, "way1", "USER_down")
    finally:
        lease.kill()
        lease.wait()
        node.shell("pkill --uid talker || :; rm -rf /run/brine/ctrl/*  /run/brine/ctrl/.*.aside-*")


def test_many_stops_take_the_memory_of_one(node: Node) -> None:
    names = [f"small{number}" for number in range(8)]
    define(node, names[0], extra_arguments=["-S"], shutdown_timeout=600)
    define_copies(node, names[0], names[1:])
    node.run(["systemctl", "start", *(f"brine-instance@{name}" for name in names)])
    node.run(["systemctl", "stop", "--no-block", *(f"brine-instance@{name}" for name in names)])

    def taken() -> bool:
        return sorted(path.name for path in node.path("/run/brine/stopper").iterdir()) == names

    wait_for("the stopper to be at all of them", taken)
    for name in names:
        qemu = info(node, name)["pid"]
        folder = f"/sys/fs/cgroup/machine.slice/brine-instance@{name}.service"
        found = node.shell(f"""
            for pid in $(cat {folder}/cgroup.procs); do
                # What the script waits with comes and goes.
                [ $pid = {qemu} ] || grep -hs ^Private_ /proc/$pid/smaps_rollup || :
            done
        """)
        sizes = [int(line.split()[1]) for line in found.splitlines()]
        assert 0 < sum(sizes) < 3 * 1024, found

    # Who waits does it itself where the stopper is gone.
    node.run(["systemctl", "kill", "--signal=KILL", "brine-stopper.service"])
    units = "/sys/fs/cgroup/machine.slice/brine-instance@small*.service"
    programs = f"cat $(sed -e s,^,/proc/, -e s,$,/comm, {units}/cgroup.procs) 2>/dev/null || :"
    all_by_themselves = "python3\n" * len(names)
    wait_for("each unit to do it", lambda: all_by_themselves in _sorted(node.shell(programs)))
    node.shell("systemctl kill --kill-whom=main --signal=KILL 'brine-instance@small*'")
    for name in names:
        assert wait_verdict(node, name) == ("admin", "stopping")


def _sorted(lines: str) -> str:
    return "".join(sorted(lines.splitlines(keepends=True)))


def test_where_an_upgrade_is_half_done_a_stop_is_the_admins_all_the_same(node: Node) -> None:
    boot(node, "half1")
    wait_watching(node, "half1")
    module = "/usr/lib/python3/dist-packages/brine/instance/shutdown.py"
    node.run(["systemctl", "stop", "brine-stopper.service"])  # it may have the module loaded
    node.run(["mv", module, "/srv/shutdown.py"])
    try:
        node.run(["systemctl", "stop", "brine-instance@half1"])
    finally:
        node.run(["mv", "/srv/shutdown.py", module])
    assert wait_verdict(node, "half1") == ("admin", "stopping")
    mark = json.loads(node.read("/run/brine/marks/half1.stop"))
    assert mark == {"run": json.loads(node.read("/run/brine/marks/half1.start"))["run"]}
    said = [row["MESSAGE"] for row in node.journal("_SYSTEMD_UNIT=brine-instance@half1.service")]
    assert any("No module named brine.instance.shutdown" in line for line in said), said
    assert not any("terminating on signal" in line for line in said), "its guest was not asked"
    node.run(["systemctl", "reset-failed", "brine-stopper.service", "brine-stopper.socket"])


def test_a_guest_is_asked_although_a_client_keeps_the_monitor_busy(node: Node) -> None:
    boot(node, "busy1", guest_agent=False)
    wait_watching(node, "busy1")
    client = (
        "import socket, time; s = socket.socket(socket.AF_UNIX);"
        " s.connect('/run/brine/ctrl/busy1.qmp'); s.recv(99); print('has it', flush=True);"
        " time.sleep(600)"
    )
    node.write("/srv/busy.log", "")
    node.shell(f'python3 -c "{client}" >>/srv/busy.log 2>&1 & echo $! >/srv/busy.pid')
    wait_for("the client to have it", lambda: "has it" in node.read("/srv/busy.log"))
    assert node.shell("stat --format %a:%U /run/brine/unit") == "700:root\n"
    node.run(["systemctl", "stop", "brine-instance@busy1"])
    assert wait_verdict(node, "busy1")[0] == "admin"
    assert node.journal("BRINE_INSTANCE=busy1", "BRINE_EVENT=ended") == []
    node.shell("kill $(cat /srv/busy.pid) || :")


_STOPS_AFTER_STARTS = """
import json, subprocess, sys, threading, time

def wanted(name):
    with open(f"/var/lib/brine/instances/{name}.json") as file:
        return json.load(file)["admin_state"]

def check(name, wait_ms):
    start = subprocess.Popen([*instance, "start", name], stderr=subprocess.PIPE, text=True)
    time.sleep(wait_ms / 1000)
    command = [*instance, "stop", "--force", "--timeout", "0.1", name]
    stop = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    _, said = start.communicate()
    show = ["systemctl", "show", "--property=ActiveState,Job,MainPID", f"brine-instance@{name}"]
    rows = subprocess.check_output(show, text=True).splitlines()
    found = dict(row.split("=", 1) for row in rows)
    is_down = found["ActiveState"] in ("inactive", "failed") and found["MainPID"] == "0"
    is_idle = found.get("Job", "") in ("", "0")
    # Which of the two came first is what the spec says: either could.
    should_be_down = wanted(name) == "down"
    if stop.returncode or is_down != should_be_down or not is_idle:
        faults.append([name, wait_ms, found, stop.returncode, stop.stderr, start.returncode, said])
    ends.append(is_down)
    if not is_down:
        subprocess.run(command, check=True)

def check_all(name, first):
    for number in range(first, tries, len(names)):
        check(name, number * 37 % 101)

tries, *names = sys.argv[1:]
tries, faults, ends = int(tries), [], []
instance = ["brine", "instance"]
threads = [threading.Thread(target=check_all, args=one) for one in zip(names, range(len(names)))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps({"tries": len(ends), "stopped": sum(ends), "faults": faults}))
"""


@pytest.mark.parametrize(
    "tries", [pytest.param(12, id="few"), pytest.param(1000, id="many", marks=pytest.mark.long)]
)
def test_a_stop_right_after_a_start_stops(node: Node, tries: int) -> None:
    names = ["after1", "after2", "after3"]
    define(node, names[0], **IDLE)
    define_copies(node, names[0], names[1:])
    command = ["python3", "-c", _STOPS_AFTER_STARTS, str(tries), *names]
    found = json.loads(node.run(command, timeout_s=3 * tries).stdout.splitlines()[-1])
    assert found["faults"] == []
    assert (found["tries"], found["stopped"] > 0) == (tries, True), found
    for name in names:
        assert info(node, name)["status"] == "ADMIN_down"
        assert left_of(node, name) == {}


def test_a_start_right_after_an_end_starts(node: Node) -> None:
    # With enough memory that the kernel takes a moment to have it back.
    define(node, "again1", extra_arguments=["-S", "-mem-prealloc"], memory_mib=512)
    node.run(["brine", "instance", "start", "again1"])
    for _ in range(3):
        for number in ("KILL", "TERM"):
            first = info(node, "again1")["pid"]
            said = node.shell(f"kill -{number} {first}; brine instance start again1")
            assert said == "started: again1\n"
            found = info(node, "again1")
            assert (found["status"], found["pid"] == first) == ("running", False)


def test_only_a_start_that_is_to_waits_for_the_network(node: Node) -> None:
    def is_online() -> bool:
        asked = ["systemctl", "is-active", "network-online.target"]
        return node.run(asked, check=False).stdout == "active\n"

    node.run(["systemctl", "stop", "network-online.target"])
    define(node, "net1", **IDLE)
    define(node, "net2", **IDLE, wait_for_network=True)
    node.run(["brine", "instance", "start", "net1"])
    assert not is_online()
    node.run(["brine", "instance", "start", "net2"])
    assert is_online()


def test_a_start_that_takes_longer_than_its_spec_lets_it_fails(node: Node) -> None:
    # A node's network that does not come up holds it up.
    node.run(["systemctl", "stop", "network-online.target"])
    folder = "/run/systemd/system"
    wants = f"{folder}/network-online.target.wants"
    node.write(f"{folder}/never.service", _NEVER)
    node.shell(f"mkdir {wants}; ln -s ../never.service {wants}; systemctl daemon-reload")
    define(node, "slow1", **IDLE, wait_for_network=True, start_timeout=3)
    said = refused(node, "start", "slow1")
    assert "did not start" in said
    assert "within 3 s" in said
    assert "brine: slow1: waiting for its start, at most 3 s\n" in said
    assert left_of(node, "slow1") == {}
    node.run(["systemctl", "stop", "never.service", "network-online.target"])
    node.shell(f"rm -r {folder}/never.service {wants}; systemctl daemon-reload")


def test_a_reset_of_one_that_ends_at_a_reboot_starts_it(node: Node) -> None:
    boot(node, "reset1", reboot_behavior="exit")
    first = info(node, "reset1")["pid"]
    node.run(["brine", "instance", "reboot", "--reset", "reset1"])
    wait_ready(node, "reset1")
    assert info(node, "reset1")["pid"] != first


def test_a_paused_guest_shuts_down_too(node: Node) -> None:
    boot(node, "web1")
    qmp(node, "web1", "stop")
    assert info(node, "web1")["qemu"] == "paused"
    node.run(["brine", "instance", "stop", "web1"])
    assert info(node, "web1")["status"] == "ADMIN_down"


def test_reboot_is_a_new_qemu_and_reset_is_not(node: Node) -> None:
    boot(node, "web1")
    first = info(node, "web1")["pid"]
    node.run(["brine", "instance", "reboot", "--reset", "web1"])
    wait_ready(node, "web1")
    assert info(node, "web1")["pid"] == first
    node.run(["brine", "instance", "reboot", "web1"])
    wait_ready(node, "web1")
    assert info(node, "web1")["pid"] != first
    assert info(node, "web1")["status"] == "running"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"disks": [{"path": "/srv/nothing"}]}, "/srv/nothing: can't be opened"),
        ({"nics": [{"link": "br0"}, {"link": "br9"}]}, "there is no bridge br9"),
        ({"kernel": "/srv/nothing"}, "/srv/nothing: can't be read"),
        ({"machine": "pc-99"}, "unsupported machine type"),
        ({"extra_arguments": ["-device", "nonsense"]}, "'nonsense' is not a valid device model"),
        ({"qemu": "/srv/nothing"}, "/srv/nothing: there is no such program"),
        ({"accel": "kvm"}, "no /dev/kvm"),
        ({"huge_pages": "/srv"}, "no hugetlbfs is mounted there"),
        ({"memory_mib": 99_999_999}, "cannot set up guest memory"),
        ({"security_model": "user", "security_user": "x"}, "there is no user x"),
        ({"vnc_bind": "::1", "vnc_password_file": "/srv/nothing"}, "/srv/nothing: can't be read"),
    ],
)
def test_what_does_not_start_says_why_and_leaves_nothing(
    node: Node, keys: dict[str, Any], said: str
) -> None:
    define(node, "web1", **{"nics": [{"link": "br0"}], **keys})
    # On a slow machine the command says what it waits for, before that.
    errors = [line for line in refused(node, "start", "web1").splitlines() if "error: " in line]
    assert errors[0].startswith("brine: error: web1: did not start: ")
    assert said in errors[0]
    assert left_of(node, "web1") == {}
    found = info(node, "web1")
    assert found["status"] == "ERROR_down"
    assert found["why"].startswith("it should be up but did not start: ")
    assert said in found["why"]
    # The last error in its log speaks of QEMU only where QEMU itself has refused something.
    run = "$(systemctl show --property=InvocationID --value brine-instance@web1)"
    log = node.shell(f"journalctl --output=cat _SYSTEMD_INVOCATION_ID={run}").splitlines()
    is_qemus = any(line.startswith("qemu-system-") for line in log)
    last = "QEMU has ended" if is_qemus else "the start failed"
    (*_, error) = [line for line in log if line.startswith("error: ")]
    assert error.startswith(f"error: web1: {last}; ")


def test_a_hostile_image_does_not_speak_in_brines_name(node: Node) -> None:
    """QEMU prints what the image calls its features: as escape sequences, and lines of its own."""
    image = DISKS / "evil.qcow2"
    make_hostile_qcow2(node.path(image), b"\x1b]0;owned\x07\n<0>brine-instance: hint: run evil")
    disk = {"path": str(image), "format": "qcow2"}
    define(node, "evil1", disks=[disk])
    said = refused(node, "start", "evil1")
    assert "Unsupported qcow2 feature" in said
    for line in said.splitlines():
        assert line.isprintable()
        assert line.startswith("brine: ")
        assert not line.startswith("brine: hint: run evil")
    command = ["brine", "instance", "start", "evil1", "--json"]
    (row,) = json.loads(node.run(command, check=False).stdout)["instances"]
    assert row["error"].isprintable()
    assert "run evil" not in (row["hint"] or "")
    found = info(node, "evil1")
    assert "Unsupported qcow2 feature" in found["why"]
    assert found["why"].isprintable()
    # QEMU's lines have no say in their priority; Brine's own record has its.
    unit = "_SYSTEMD_UNIT=brine-instance@evil1.service"
    records = node.journal(unit)
    qemus = [one for one in records if one["_TRANSPORT"] == "stdout"]
    assert {one["PRIORITY"] for one in qemus} == {"6"}
    ours = [one["MESSAGE"] for one in records if one["PRIORITY"] == "3"]
    assert any("QEMU has ended" in str(one) for one in ours)
    # The same of a plug, where QEMU answers with it.
    other = DISKS / "other.qcow2"
    node.run(["cp", str(image), str(other)])
    boot_idle(node, "evil2")
    add = ["brine", "disk", "add", "evil2", "--path", str(other), "--format", "qcow2"]
    done = node.run(add, check=False)
    assert done.returncode == 1
    for line in done.stderr.splitlines():
        assert line.isprintable()
        assert line.startswith("brine: ")
        assert not line.startswith("brine: hint: run evil")


def test_disks_and_nics_are_in_their_slots_and_in_the_runtime_file(node: Node) -> None:
    for name in ("a", "b", "c"):
        node.run(["truncate", "--size=2M", DISKS / f"{name}.img"])
    disks = [
        {"path": f"{DISKS}/a.img", "serial": "first"},
        {"path": f"{DISKS}/b.img", "interface": "scsi", "cache": "writeback", "discard": False},
        {"path": f"{DISKS}/c.img", "interface": "ide", "read_only": False},
    ]
    nics = [
        {"link": "br0", "mac": "52:54:00:00:00:01"},
        {"mode": "routed", "ips": ["198.51.100.9"], "model": "e1000", "mac": "52:54:00:00:00:02"},
    ]
    boot(node, "web1", disks=disks, nics=nics)
    listed = json.loads(node.run(["brine", "disk", "list", "web1", "--json"]).stdout)
    assert (listed[0]["slot"], listed[0]["serial"]) == (12, "first")
    listed = json.loads(node.run(["brine", "nic", "list", "web1", "--json"]).stdout)
    assert [(nic["slot"], nic["mac"]) for nic in listed] == [
        (13, "52:54:00:00:00:01"),
        (14, "52:54:00:00:00:02"),
    ]
    buses = qmp(node, "web1", "query-pci")
    slots = {device["qdev_id"]: device["slot"] for device in buses[0]["devices"]}
    runtime = json.loads(node.read("/var/lib/brine/runtime/web1.json"))
    recorded = {one["hvinfo"]["id"]: one["pci"] for one in runtime["nics"]}
    assert recorded == {name: slots[name] for name in recorded}
    assert len(recorded) == 2
    assert {one["id"] for one in info(node, "web1")["obstacles"]} == {"cpu", "disk"}
    assert "198.51.100.9 dev vm-web1" in node.run(["ip", "route"]).stdout
    node.run(["brine", "instance", "stop", "web1"])
    assert left_of(node, "web1") == {}


def test_what_is_plugged_in_is_there_after_a_restart(node: Node) -> None:
    node.run(["truncate", "--size=2M", DISKS / "hot.img"])
    boot(node, "web1", nics=[{"link": "br0", "mac": "52:54:00:00:00:01"}])
    node.run(["brine", "disk", "add", "web1", "--path", DISKS / "hot.img"])
    node.run(["brine", "nic", "remove", "web1", "52:54:00:00:00:01"])
    node.run(["systemctl", "restart", "brine-kvmd"])
    assert len(json.loads(node.run(["brine", "disk", "list", "web1", "--json"]).stdout)) == 1
    found = info(node, "web1")
    assert (found["restart_pending"], found["nics"]) == ([], [])
    # QEMU and the runtime file agree on its devices.
    assert {one["id"] for one in found["obstacles"]} == {"cpu", "disk"}
    assert [(one["path"], one["since_start"]) for one in found["disks"]] == [
        (f"{DISKS}/hot.img", False)
    ]
    changed = {**found["spec"], "disks": [{"path": f"{DISKS}/hot.img"}], "memory_mib": 160}
    dumped = json.dumps({key: changed[key] for key in changed if key != "nics"})
    said = node.run(["brine", "instance", "define", "-"], stdin=dumped).stdout
    gone = "removed from its spec: NIC 52:54:00:00:00:01"
    assert said.startswith(f"defined: web1; {gone}; it runs, ")
    listed = node.run(["brine", "instance", "list", "--wide"]).stdout
    assert "128 MiB" in listed
    assert "restart pending: memory_mib\n" in listed
    node.run(["brine", "instance", "reboot", "web1"])
    assert info(node, "web1")["restart_pending"] == []
    found = info(node, "web1")["spec"]
    assert [disk["path"] for disk in found["disks"]] == [f"{DISKS}/hot.img"]
    assert found["nics"] == []
    assert len(json.loads(node.run(["brine", "disk", "list", "web1", "--json"]).stdout)) == 1


def defined_live(node: Node, given: object, *options: str, status: int = 0) -> dict[str, Any]:
    """The output of `brine instance define --live` for a spec, or for several."""
    command = ["brine", "instance", "define", "-", "--live", "--json", *options]
    done = node.run(command, stdin=json.dumps(given), check=False)
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def plugged(node: Node, name: str) -> tuple[list[str], list[str]]:
    """The paths of the disks, and the MAC addresses of the NICs, that an instance has."""
    disks = json.loads(node.run(["brine", "disk", "list", name, "--json"]).stdout)
    nics = json.loads(node.run(["brine", "nic", "list", name, "--json"]).stdout)
    return sorted(one["path"] for one in disks), sorted(one["mac"] for one in nics)


def changes(told: dict[str, Any]) -> dict[str, list[str]]:
    """The live changes, in short."""
    short = {
        key: [one.get("mac") or one["path"] for one in told[key]]
        for key in ("attached", "detached")
    }
    return {**short, "restart_pending": told["restart_pending"]}


@pytest.mark.both_releases
def test_what_is_defined_live_is_there_at_once_and_after_a_restart(node: Node) -> None:
    for name in ("a", "b", "i"):
        node.run(["truncate", "--size=2M", DISKS / f"{name}.img"])
    node.shell("ip link add br1 type bridge; ip link set br1 up")
    first, second, third = ("52:54:00:00:00:01", "52:54:00:00:00:02", "52:54:00:00:00:03")
    by_hand = "52:54:00:00:00:09"
    a, b, i = (f"{DISKS}/{name}.img" for name in ("a", "b", "i"))
    ide = {"path": i, "interface": "ide"}
    nics = [{"link": "br0", "mac": first}, {"link": "br0", "mac": second}]
    boot(node, "web1", disks=[{"path": a}, ide], nics=nics)
    node.run(["brine", "nic", "add", "web1", "--link", "br0", "--mac", by_hand])

    nics = [{"link": "br1", "mac": first}, {"link": "br0", "mac": third}]
    disks = [{"path": b}, {**ide, "cache": "writeback"}]
    spec = {"name": "web1", **SMALLEST, "memory_mib": 160, "disks": disks, "nics": nics}
    expected = {
        "attached": [first, b, third],
        "detached": [a, second, first],
        "restart_pending": ["memory_mib", "disks"],
    }
    before = node.read("/var/lib/brine/instances/web1.json")
    assert changes(defined_live(node, spec, "--dry-run")) == expected
    assert plugged(node, "web1") == ([a], [first, second, by_hand])
    assert node.read("/var/lib/brine/instances/web1.json") == before
    told = defined_live(node, spec)
    assert (changes(told), told["live_errors"]) == (expected, [])
    assert told["spec"] == info(node, "web1")["spec"]
    assert plugged(node, "web1") == ([b], [first, third, by_hand])
    assert info(node, "web1")["restart_pending"] == ["memory_mib", "disks"]
    assert run_in_guest(node, "web1", "cat /sys/class/net/*/address | grep -c 52:54") == "3\n"

    spec["disks"] = disks = [{"path": b}, ide]
    told = defined_live(node, spec)
    assert changes(told) == {"attached": [], "detached": [], "restart_pending": ["memory_mib"]}
    told = defined_live(node, [spec])
    assert told["instances"][0]["changed"] is False
    said = node.run(["brine", "instance", "define", "-", "--live"], stdin=json.dumps(spec)).stdout
    assert said == "unchanged: web1; restart pending: memory_mib\n"
    slots = [one["slot"] for one in info(node, "web1")["spec"]["nics"]]
    node.run(["brine", "instance", "reboot", "web1"])
    found = info(node, "web1")
    assert found["restart_pending"] == []
    assert [one["mac"] for one in found["spec"]["nics"]] == [first, third, by_hand]
    assert [one["slot"] for one in found["spec"]["nics"]][:2] == slots
    assert plugged(node, "web1") == ([b], [first, third, by_hand])


def test_what_can_not_be_changed_live_is_told_and_tried_again(node: Node) -> None:
    node.run(["truncate", "--size=2M", DISKS / "c.img"])
    first, second, c = "52:54:00:00:00:01", "52:54:00:00:00:02", f"{DISKS}/c.img"
    boot(node, "web1", nics=[{"link": "br0", "mac": first}])
    nics = [{"link": "br0", "mac": first}, {"link": "br7", "mac": second}]
    spec = {"name": "web1", **SMALLEST, "disks": [{"path": c}], "nics": nics}
    told = defined_live(node, spec, status=1)
    assert changes(told) == {"attached": [c], "detached": [], "restart_pending": ["nics"]}
    (error,) = told["live_errors"]
    assert error.startswith(f"web1: NIC {second} is not plugged in: ")
    assert "br7" in error
    assert info(node, "web1")["restart_pending"] == ["nics"]
    node.shell("ip link add br7 type bridge; ip link set br7 up")
    told = defined_live(node, spec)
    assert changes(told) == {"attached": [second], "detached": [], "restart_pending": []}

    # A guest that stands still gives nothing up until it goes on.
    node.run(["brine", "instance", "pause", "web1"])
    told = defined_live(node, {**spec, "nics": []}, status=1)
    assert changes(told) == {"attached": [], "detached": [], "restart_pending": ["nics"]}
    assert [error.partition(" is not taken out: ")[0] for error in told["live_errors"]] == [
        f"web1: NIC {first}",
        f"web1: NIC {second}",
    ]
    # So long it is not said to have what it may yet give up.
    told = defined_live(node, spec, status=1)
    assert changes(told) == {"attached": [], "detached": [], "restart_pending": ["nics"]}
    released = "the guest was asked to release it, and may still do so"
    assert [released in error for error in told["live_errors"]] == [True, True]
    node.run(["brine", "instance", "resume", "web1"])
    told = defined_live(node, {**spec, "nics": []})
    assert (told["restart_pending"], told["changed"]) == ([], True)
    assert plugged(node, "web1") == ([c], [])


def test_what_is_recorded_for_the_next_start_is_defined_live(node: Node) -> None:
    node.run(["truncate", "--size=2M", DISKS / "e.img"])
    e = f"{DISKS}/e.img"
    boot(node, "web1")
    later = ["brine", "disk", "add", "web1", "--path", e, "--no-hotplug"]
    node.run(later)
    spec = {"name": "web1", **SMALLEST, "disks": [{"path": e}]}
    told = defined_live(node, spec)
    assert changes(told) == {"attached": [e], "detached": [], "restart_pending": []}
    assert plugged(node, "web1") == ([e], [])
    # Another disk with the same file.
    spec["disks"] = [{"path": e, "uuid": "11111111-1111-4111-8111-111111111111"}]
    for options in (["--dry-run"], []):
        told = defined_live(node, spec, *options)
        assert changes(told) == {"attached": [e], "detached": [e], "restart_pending": []}
    assert plugged(node, "web1") == ([e], [])
    told = defined_live(node, {**spec, "disks": []})
    assert changes(told) == {"attached": [], "detached": [e], "restart_pending": []}
    # What a former spec had is not there after the next start.
    spec["disks"] = [{"path": e}]
    node.run(["brine", "instance", "define", "-"], stdin=json.dumps(spec))
    node.run(later)
    told = defined_live(node, {**spec, "disks": []})
    assert changes(told) == {"attached": [], "detached": [], "restart_pending": []}
    runtime = json.loads(node.read("/var/lib/brine/runtime/web1.json"))
    assert (runtime["disks"], runtime["spec"]["disks"]) == ([], [])


def test_devices_move_between_instances_that_run(node: Node) -> None:
    node.run(["truncate", "--size=2M", DISKS / "d.img"])
    disk, nic = {"path": f"{DISKS}/d.img"}, {"link": "br0", "mac": "52:54:00:00:00:01"}
    define(node, "web1", disks=[disk], nics=[nic])
    define(node, "web2")
    for name in ("web1", "web2"):
        node.run(["brine", "instance", "start", name])
    for name in ("web1", "web2"):
        wait_ready(node, name)
    # As long as the first one runs with it, no other one starts with it.
    define(node, "web1", disks=[disk])
    define(node, "web3", nics=[nic])
    failed = node.run(["brine", "instance", "start", "web3"], check=False)
    assert f"{nic['mac']} is the MAC address of web1" in failed.stderr
    node.run(["brine", "instance", "undefine", "web3"])
    define(node, "web1", disks=[disk], nics=[nic])
    both = {"disks": [disk], "nics": [nic]}
    specs = [{"name": "web2", **SMALLEST, **both}, {"name": "web1", **SMALLEST}]
    expected = {disk["path"], nic["mac"]}
    for options in (["--dry-run"], []):
        got, gave = defined_live(node, specs, *options)["instances"]
        assert {one.get("path") or one["mac"] for one in got["attached"]} == expected
        assert {one.get("path") or one["mac"] for one in gave["detached"]} == expected
    # An edit does the same as a definition.
    editor = "EDITOR='sed -i s/52:54:00:00:00:01/52:54:00:00:00:02/'"
    said = node.shell(f"{editor} brine instance edit web2 --live")
    assert "attached: NIC 52:54:00:00:00:02; detached: NIC 52:54:00:00:00:01" in said
    assert plugged(node, "web2") == ([disk["path"]], ["52:54:00:00:00:02"])


@pytest.mark.both_releases
def test_the_collectors_service_looks_after_what_was_begun(node: Node) -> None:
    # A name of its own, as the collector also tells of what earlier tests left.
    node.run(["truncate", "--size=2M", DISKS / "begun.img"])
    boot_idle(node, "begun1")
    node.run(["brine", "disk", "add", "begun1", "--path", DISKS / "begun.img"])
    with pytest.raises(CommandError):
        node.run(["brine", "disk", "remove", "begun1", DISKS / "begun.img", "--timeout", "1"])
    begun = [file.name for file in node.path("/run/brine/operations").glob("*.json")]
    assert len(begun) == 1
    node.run(["systemctl", "start", "brine-tap-gc.service"])
    said = [row["MESSAGE"] for row in node.journal("_SYSTEMD_UNIT=brine-tap-gc.service")]
    assert [line for line in said if "begun1" in line] == []
    assert [file.name for file in node.path("/run/brine/operations").glob("*.json")] == begun
    qmp(node, "begun1", "quit")


def test_a_nics_filter_is_there_with_each_qemu(node: Node) -> None:
    nics = [{"link": "br0", "filter": True, "ips": ["192.0.2.77"]}, {"link": "br0"}]
    boot_idle(node, "filtered1", nics=nics)

    def filters() -> list[str]:
        taps = json.loads(node.run(["brine", "tap", "list", "--json"]).stdout)
        return [tap["filter"] for tap in taps if tap["instance"] == "filtered1"]

    assert sorted(filters()) == ["none", "on"]
    node.run(["brine", "instance", "reboot", "filtered1", "--force"])
    assert sorted(filters()) == ["none", "on"]
    editor = 'EDITOR=\'sed -i s/\\"filter\\":.*false/\\"filter\\":true/\''
    node.shell(f"{editor} brine instance edit filtered1")
    node.run(["brine", "instance", "reboot", "filtered1", "--force"])
    assert filters() == ["on", "on"]
    rules = node.run(["nft", "list", "ruleset"]).stdout
    assert "192.0.2.77" in rules
    qmp(node, "filtered1", "quit")


@pytest.mark.both_releases
def test_an_overlay_stands_on_what_its_spec_names_and_on_nothing_else(node: Node) -> None:
    folder = node.path(DISKS)
    (folder / "base.img").write_bytes(b"of the base\n".ljust(2 << 20, b"\0"))
    (folder / "secret.img").write_bytes(b"a secret\n".ljust(2 << 20, b"\0"))
    # What the images' headers say is never followed.
    make_qcow2(folder / "middle.qcow2", 2 << 20, backing=f"{DISKS}/secret.img")
    named: dict[str, Any] = {"path": f"{DISKS}/base.img", "format": "raw"}
    named = {"path": f"{DISKS}/middle.qcow2", "format": "qcow2", "backing": named}
    for name in ("web1", "web2"):
        make_qcow2(folder / f"{name}.qcow2", 2 << 20, backing="secret.img")
        disk = {"path": f"{DISKS}/{name}.qcow2", "format": "qcow2"}
        spec = json.dumps({"name": name, **SMALLEST, "disks": [disk]})
        with pytest.raises(CommandError, match='hint: name it in the spec: "backing"'):
            node.run(["brine", "instance", "define", "-"], stdin=spec)
        define(node, name, disks=[{**disk, "backing": named}])
    start(node, "web1")
    node.run(["brine", "instance", "start", "web2"])
    assert run_in_guest(node, "web1", "head -n 1 /dev/vda") == "of the base\n"
    run_in_guest(node, "web1", "echo of web1 | dd of=/dev/vda conv=notrunc,fsync 2>/dev/null")
    assert run_in_guest(node, "web1", "head -n 1 /dev/vda") == "of web1\n"
    # So does its next start, for which the record of the last one is read.
    node.run(["brine", "instance", "stop", "--force", "web1"])
    start(node, "web1")
    assert run_in_guest(node, "web1", "head -n 1 /dev/vda") == "of web1\n"
    wait_ready(node, "web2")
    assert run_in_guest(node, "web2", "head -n 1 /dev/vda") == "of the base\n"
    assert (folder / "base.img").read_bytes().startswith(b"of the base\n")

    with pytest.raises(CommandError, match=r"base\.img is also a disk of web."):
        define(node, "web3", disks=[{"path": f"{DISKS}/base.img", "format": "raw"}])
    node.run(["brine", "disk", "remove", "web1", f"{DISKS}/web1.qcow2"])
    assert qmp(node, "web1", "query-named-block-nodes") == []
    sets = [one["fds"][0]["opaque"] for one in qmp(node, "web1", "query-fdsets")]
    assert sets == ["console-log"]

    overlay = {"path": f"{DISKS}/web1.qcow2", "format": "qcow2", "backing": named}
    told = defined_live(node, {"name": "web1", **SMALLEST, "disks": [overlay]})
    assert (changes(told)["attached"], told["live_errors"]) == ([overlay["path"]], [])
    first = (
        "for one in 1 2 3 4 5 6 7 8 9; do head -n 1 /dev/vda 2>/dev/null && break; sleep 1; done"
    )
    assert run_in_guest(node, "web1", first) == "of web1\n"
    node.run(["brine", "disk", "remove", "web1", f"{DISKS}/web1.qcow2"])
    assert qmp(node, "web1", "query-named-block-nodes") == []
    assert [one["fds"][0]["opaque"] for one in qmp(node, "web1", "query-fdsets")] == sets


_MEDIA = {"a": 4096, "b": 8192}


def in_drive(node: Node, name: str, number: int) -> str:
    """Which medium QEMU has in a drive, by its size; empty if there is none."""
    (drive,) = [one for one in qmp(node, name, "query-block") if one["qdev"] == f"cdrom{number}"]
    if not drive.get("inserted"):
        return ""
    assert drive["inserted"]["ro"]
    size = drive["inserted"]["image"]["virtual-size"]
    return next(medium for medium in _MEDIA if _MEDIA[medium] == size)


@pytest.mark.both_releases
def test_what_is_in_a_cdrom_drive_is_changed_while_it_runs(node: Node) -> None:
    for medium, size in _MEDIA.items():
        node.write(f"/srv/{medium}.iso", medium * size)
    # One that stands still keeps descriptors open, which it was told to close, until it goes on.
    define(node, "cd1", cdroms=["", "/srv/a.iso"])
    cdrom = ["brine", "instance", "cdrom", "cd1"]
    node.run(["brine", "instance", "start", "cd1"])
    assert [in_drive(node, "cd1", number) for number in (0, 1)] == ["", "a"]
    assert node.run([*cdrom, "/srv/b.iso"]).stdout == "changed: drive 0 of cd1 has /srv/b.iso\n"
    assert node.run([*cdrom, "/srv/b.iso"]).stdout == "unchanged: drive 0 of cd1 has /srv/b.iso\n"
    node.run([*cdrom, "/srv/b.iso", "--drive", "1"])
    assert [in_drive(node, "cd1", number) for number in (0, 1)] == ["b", "b"]
    node.run([*cdrom, "--eject"])
    node.run([*cdrom, "--eject", "--drive", "1"])
    node.run([*cdrom, "/srv/a.iso", "--drive", "1"])
    assert [in_drive(node, "cd1", number) for number in (0, 1)] == ["", "a"]
    found = info(node, "cd1")
    assert (found["spec"]["cdroms"], found["restart_pending"]) == (["", "/srv/a.iso"], [])
    # Nothing of the media before is open any more.
    sets = [one["fds"] for one in qmp(node, "cd1", "query-fdsets")]
    assert sum(fd["opaque"].startswith("cdrom") for fds in sets for fd in fds) == 1
    assert "/srv/b.iso" not in node.shell(f"ls -l /proc/{found['pid']}/fd")
    nodes = {one["node-name"] for one in qmp(node, "cd1", "query-named-block-nodes")}
    assert len([one for one in nodes if one.startswith("cdrom")]) == 1
    assert "/srv/c.iso: can't be opened" in refused(node, "cdrom", "cd1", "/srv/c.iso")
    assert "none with the number 2" in refused(node, "cdrom", "cd1", "/srv/a.iso", "--drive", "2")
    node.run(["brine", "instance", "reboot", "--force", "--timeout", "1", "cd1"])
    assert [in_drive(node, "cd1", number) for number in (0, 1)] == ["", "a"]


def test_a_clone_runs_beside_the_other(node: Node) -> None:
    node.run(["truncate", "--size=2M", DISKS / "one1.img"])
    nics = [{"link": "br0"}]
    disks = [{"path": f"{DISKS}/one1.img", "format": "raw"}]
    boot_idle(node, "one1", disks=disks, nics=nics)
    assert "changes while it is copied" in refused(node, "clone", "one1", "one2")
    node.run(["brine", "instance", "stop", "--force", "one1"])
    node.run(["brine", "instance", "clone", "one1", "one2"])
    for name in ("one1", "one2"):
        node.run(["brine", "instance", "start", name])
    found = [info(node, name) for name in ("one1", "one2")]
    assert [one["status"] for one in found] == ["running", "running"]
    assert len({one["spec"]["nics"][0]["mac"] for one in found}) == 2
    assert [one["disks"][0]["path"] for one in found] == [
        f"{DISKS}/one1.img",
        f"{DISKS}/one2.img",
    ]


@pytest.mark.both_releases
@pytest.mark.parametrize("model", ["user", "pool"])
def test_qemu_is_another_user_in_an_empty_root(node: Node, model: str) -> None:
    node.write("/etc/brine/instance.toml", 'uid_pool = "4000-4009"\n')
    node.shell(f"truncate --size=2M {DISKS}/own.img; chmod 600 {DISKS}/own.img")
    keys = {"security_model": model, "chroot": True, "nics": [{"link": "br0"}]}
    keys["vnc_bind"] = "/srv/web1.vnc"
    user = {"security_user": "daemon"} if model == "user" else {}
    boot_idle(node, "web1", disks=[{"path": f"{DISKS}/own.img"}], **keys, **user)
    pid = info(node, "web1")["pid"]
    status = node.run(["cat", f"/proc/{pid}/status"]).stdout
    (uids,) = [line.split()[1:] for line in status.splitlines() if line.startswith("Uid:")]
    assert len(set(uids)) == 1
    if model == "pool":
        assert 4000 <= int(uids[0]) <= 4009
        lock = f"/run/lock/brine/uid-{uids[0]}.lock"
        taken = node.run(["flock", "--nonblock", lock, "true"], check=False)
        assert taken.returncode != 0, "its QEMU does not hold the lock"
    assert int(uids[0]) != 0
    assert node.run(["readlink", f"/proc/{pid}/root"]).stdout.strip() == "/run/brine/empty"
    node.run(["brine", "nic", "add", "web1", "--link", "br0"])
    node.run(["test", "-S", "/srv/web1.vnc"])
    node.run(["brine", "instance", "stop", "--force", "web1"])
    assert left_of(node, "web1") == {}
    assert node.run(["test", "-e", "/srv/web1.vnc"], check=False).returncode == 1
    noted = node.run(["stat", "--format=%U %a", "/run/brine/qemu-versions.json"]).stdout
    assert noted.strip() == "root 600"


def test_a_vnc_password_is_on_no_command_line_and_in_no_log(node: Node) -> None:
    node.write("/srv/password", "s3cr3t-1\n", mode=0o600)
    boot_idle(node, "web1", vnc_bind="127.0.0.1", vnc_password_file="/srv/password")
    found = qmp(node, "web1", "query-vnc")
    assert (found["enabled"], found["auth"]) == (True, "vnc")
    assert not [word for word in command_line(node, "web1") if "s3cr3t" in word]
    assert "s3cr3t" not in node.run(["journalctl", "--no-pager"]).stdout
    assert "s3cr3t" not in node.read("/var/lib/brine/runtime/web1.json")
    script = (
        "import socket; s = socket.create_connection(('127.0.0.1', 5900)); s.recv(12);"
        " s.sendall(b'RFB 003.008\\n'); print(list(s.recv(9)))"
    )
    # One kind of authentication is offered, and it is VNC's: none gets in without.
    assert node.run(["python3", "-c", script]).stdout.strip() == "[1, 2]"


def test_the_console_has_a_way_out(node: Node) -> None:
    boot(node, "web1")
    ours, theirs = pty.openpty()
    command = node.command(["brine", "instance", "console", "web1"])
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as console:
        os.close(theirs)
        try:
            _read_until(ours, b"Ctrl-] leaves")
            # Who had the line before may have left half an order on it.
            heard = _read_until(ours, b"guest: ready", typed=b"\rhello\r")
            os.write(ours, b"\x1d")
            assert console.wait(30) == 0, heard
        finally:
            console.kill()
    os.close(ours)
    assert info(node, "web1")["status"] == "running"


def test_a_node_that_starts_has_its_instances_back(node: Node) -> None:
    for number, name in enumerate(["last", "first", "off", "bad"]):
        define(node, name, start_order=200 - 100 * (number % 2), **IDLE)
    define(node, "bad", kernel="/srv/nothing")
    for name in ("last", "first"):
        node.run(["brine", "instance", "start", name])
    node.run(["brine", "instance", "start", "bad"], check=False)
    node.shell("systemctl stop 'brine-instance@*'")
    node.run(["systemctl", "start", "brine-instances.target"])
    assert info(node, "first")["status"] == info(node, "last")["status"] == "running"
    assert info(node, "off")["status"] == "ADMIN_down"
    assert info(node, "bad")["status"] == "ERROR_down"
    assert info(node, "first")["since"] <= info(node, "last")["since"]
    assert "/srv/nothing" in node.run(["journalctl", "--unit=brine-instances.service"]).stdout


def test_twenty_at_once(node: Node) -> None:
    names = [f"many{number}" for number in range(20)]
    for name in names:
        define(node, name, admin_state="up", nics=[{"link": "br0"}], **IDLE)
    node.write("/etc/brine/instance.toml", "parallel_starts = 20\n")
    node.run(["brine", "instance", "start", "--all"], timeout_s=300)
    found = json.loads(node.run(["brine", "instance", "list", "--json"]).stdout)
    assert [(one["name"], one["status"]) for one in found] == [
        (name, "running") for name in sorted(names)
    ]
    assert len({one["pid"] for one in found}) == 20
    node.shell("systemctl kill --signal=KILL --kill-whom=main 'brine-instance@*'")
    node.run(["systemctl", "stop", *(f"brine-instance@{name}" for name in names)], timeout_s=300)
    assert [left_of(node, name) for name in names] == [{}] * 20


@pytest.mark.parametrize("count", [8, pytest.param(64, marks=pytest.mark.long)])
def test_of_many_at_once_no_two_have_a_user_id(node: Node, count: int) -> None:
    names = [f"pool{number}" for number in range(count)]
    # As many, and not one more.
    node.write("/etc/brine/instance.toml", f'uid_pool = "4000-{4000 + count - 1}"\n')
    small = {"memory_mib": 16, "kernel": "", "initrd": "", "append": ""}
    define(node, "more", security_model="pool", **small, **IDLE)
    define_copies(node, "more", names)
    units = [f"brine-instance@{name}" for name in names]
    # All of them run together, but one that starts has to answer in time.
    for half in (units[: count // 2], units[count // 2 :]):
        node.run(["systemctl", "start", *half], timeout_s=300)
    shown = node.run(["systemctl", "show", "--property=MainPID", "--value", *units]).stdout.split()
    uids = [
        {line.split()[number] for number in range(1, 5)}
        for pid in shown
        for line in node.read(f"/proc/{pid}/status").splitlines()
        if line.startswith("Uid:")
    ]
    assert sorted(uids, key=min) == [{str(uid)} for uid in range(4000, 4000 + count)]
    assert f"{count} user ids of the pool are all in use" in refused(node, "start", "more")
    node.run(["systemctl", "stop", *units], timeout_s=300)
    assert left_of(node, "pool") == {}
    node.run(["brine", "instance", "start", "more"])


def test_killed_at_a_start_it_is_repaired_by_the_next(node: Node) -> None:
    node.run(["truncate", "--size=2M", DISKS / "killed.img"])
    define(node, "web1", disks=[{"path": f"{DISKS}/killed.img"}], nics=[{"link": "br0"}], **IDLE)
    for delay_s in (0, 0.1, 0.3, 0.6):
        command = node.command(["systemctl", "start", "brine-instance@web1"])
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as starting:
            time.sleep(delay_s)
            node.shell("systemctl kill --signal=KILL brine-instance@web1 2>/dev/null || :")
            starting.wait(60)
        wait_for(
            "the unit to have ended",
            lambda: info(node, "web1")["oper_state"] in ("down", "running"),
            timeout_s=60,
        )
        # What clears up may have been killed, too.
        node.run(["brine", "instance", "start", "web1"])
        assert info(node, "web1")["status"] == "running"
        node.shell(f"kill -KILL {info(node, 'web1')['pid']}")
        wait_status(node, "web1", "ERROR_down")
    assert left_of(node, "web1") == {}


GANETIS = [
    ["/usr/bin/qemu-system-x86_64", "-name", "web1"],
    [{"mac": "aa:00:00:35:ac:19", "nicparams": {"mode": "bridged", "link": "br0"}}],
    {"acpi": True, "kernel_path": ""},
    [[{"dev_type": "file", "logical_id": ["loop", "/srv/a"], "size": 2}, "/srv/a", None]],
]


@pytest.mark.parametrize("elements", [3, 4])
def test_a_runtime_file_of_ganetis_is_understood(node: Node, elements: int) -> None:
    file = "/var/lib/brine/runtime/web1.json"
    define(node, "web1", nics=[{"link": "br0"}], **IDLE)
    node.write(file, json.dumps(GANETIS[:elements]), mode=0o600)
    assert info(node, "web1")["status"] == "ADMIN_down"
    node.run(["brine", "instance", "start", "web1"])
    assert info(node, "web1")["status"] == "running"
    node.write(file, json.dumps(GANETIS[:elements]), mode=0o600)
    node.run(["brine", "nic", "add", "web1", "--link", "br0", "--mac", "52:54:00:00:00:07"])
    runtime = json.loads(node.read(file))
    assert [nic["mac"] for nic in runtime[1]] == ["aa:00:00:35:ac:19", "52:54:00:00:00:07"]
    assert len(runtime) == 4
    node.run(["brine", "nic", "list", "web1"])
    node.run(["brine", "instance", "stop", "--force", "web1"])
    assert left_of(node, "web1") == {}
    told = node.run(["journalctl", "--priority=warning", "--unit=brine-instance@web1", "--boot"])
    assert "its user id" not in told.stdout
    node.run(["brine", "instance", "start", "web1"])
    assert len(json.loads(node.read(file))["nics"]) == 1


_SEND = """
import json, os, socket, sys

pid, *addresses = sys.argv[1:]
with open(f"/proc/{pid}/cgroup") as file:
    (cgroup,) = (line[3:].rstrip() for line in file if line.startswith("0::"))
with open("/proc/self/mounts") as file:
    (root,) = (line.split()[1] for line in file if line.split()[2] == "cgroup2")
with open(f"{root}{cgroup}/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
said = {}
for address in addresses:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(b"x", (address, 9))
            said[address] = "sent"
        except OSError as error:
            said[address] = error.strerror
print(json.dumps(said))
"""


def sent_from_unit(node: Node, pid: int, *addresses: str) -> dict[str, str]:
    """The fate of a datagram to each address from a process in the cgroup of process `pid`."""
    sent = node.run(["python3", "-", str(pid), *addresses], stdin=_SEND).stdout
    found: dict[str, str] = json.loads(sent)
    return found


@pytest.mark.both_releases
def test_what_breaks_out_finds_nothing_to_use(node: Node) -> None:
    plain = {key: value for key, value in IDLE.items() if key != "extra_arguments"}
    routed = {"mode": "routed", "ips": ["192.0.2.7", "2001:db8::7"]}
    keys = {"vnc_bind": "127.0.0.1", "nics": [{"link": "br0"}, routed]}
    # One that might talk with anybody, as what its arguments do is not known.
    boot_idle(node, "web1")
    node.run(["brine", "instance", "stop", "--force", "web1"])
    define(node, "web1", **keys, **plain)
    node.run(["brine", "instance", "start", "web1"])
    pid = info(node, "web1")["pid"]
    status = dict(
        line.split(":\t", 1)
        for line in node.read(f"/proc/{pid}/status").splitlines()
        if ":\t" in line
    )
    uid = int(status["Uid"].split()[0])
    assert 1_900_000_000 <= uid <= 1_900_000_999
    assert set(status["Uid"].split() + status["Gid"].split()) == {str(uid)}
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    # The right to become another user, in another root: for QEMU's own first steps.
    assert int(status["CapBnd"], 16) == (1 << 6) | (1 << 7) | (1 << 18)
    assert status["NoNewPrivs"] == "1"
    assert node.run(["readlink", f"/proc/{pid}/root"]).stdout == "/run/brine/empty\n"
    limits = node.read(f"/proc/{pid}/limits")
    assert re.search(r"Max core file size +0 +0 ", limits)
    shown = ["systemctl", "show", "brine-instance@web1"]
    addresses = node.run([*shown, "--property=IPAddressAllow", "--value"]).stdout.split()
    assert sorted(addresses) == ["127.0.0.0/8", "::1/128"]
    # Real packets of the unit's: they get to VNC's address, and nowhere else.
    assert sent_from_unit(node, pid, "127.0.0.1", "::1", "192.0.2.7", "2001:db8::7") == {
        "127.0.0.1": "sent",
        "::1": "sent",
        "192.0.2.7": "Operation not permitted",
        "2001:db8::7": "Operation not permitted",
    }
    # VNC and the routed tap's own settings are as without all that.
    greeting = "exec 3<>/dev/tcp/127.0.0.1/5900; timeout 20 head -c 12 <&3"
    assert node.shell(greeting).startswith("RFB 003.")
    assert "192.0.2.7" in node.run(["ip", "route"]).stdout
    # Another target is no reason to stop.
    node.run(["systemctl", "isolate", "multi-user.target"])
    assert info(node, "web1")["pid"] == pid


@pytest.mark.parametrize(("group", "refused"), [("disk", True), ("brine", True), ("users", False)])
def test_a_user_of_a_mighty_group_is_refused(node: Node, group: str, refused: bool) -> None:
    node.shell(f"userdel guests 2>/dev/null || :; useradd --no-create-home --gid {group} guests")
    define(node, "web1", security_model="user", security_user="guests", **IDLE)
    started = node.run(["brine", "instance", "start", "web1"], check=False)
    assert (started.returncode != 0) == refused
    if refused:
        assert f"security_user must not be of the group {group}" in started.stderr


def test_limits_are_the_kernels(node: Node) -> None:
    limits = {"memory_max_mib": 1500, "cpu_limit_percent": 150, "cpu_weight": 50}
    boot(node, "web1", **limits)
    unit = ["systemctl", "show", "brine-instance@web1.service"]
    wanted = ["MemoryMax", "MemorySwapMax", "CPUQuotaPerSecUSec", "CPUWeight"]
    shown = node.run([*unit, f"--property={','.join(wanted)}"]).stdout
    assert sorted(shown.split()) == [
        "CPUQuotaPerSecUSec=1.500000s",
        "CPUWeight=50",
        f"MemoryMax={1500 << 20}",
        f"MemorySwapMax={1500 << 20}",
    ]
    too_low = {"name": "web1", **SMALLEST, "memory_max_mib": 300}
    command = ["brine", "instance", "define", "-"]
    done = node.run(command, stdin=json.dumps(too_low), check=False)
    assert (done.returncode, "/memory_max_mib" in done.stderr) == (1, True)
    define(node, "web1", **IDLE)
    node.run(["brine", "instance", "reboot", "--force", "web1"])
    assert node.run([*unit, "--property=MemoryMax"]).stdout == "MemoryMax=infinity\n"


SCRIPT = """#!/bin/sh -e
[ "$1" = down ] || ip link set dev "$INTERFACE" txqueuelen 500
echo "$1" >>/var/lib/script-calls
"""


@pytest.mark.both_releases
def test_the_unit_allows_all_kinds_of_starts(node: Node) -> None:
    node.shell("mkdir --mode=0700 /home/ann; truncate -s 1M /home/ann/disk /tmp/disk /etc/disk")
    node.shell("truncate -s 1M /usr/share/medium.iso")
    node.run(["brine", "tap", "gc", "--all"])  # no script runs for these later
    node.write("/etc/brine/nic.d/50-script", SCRIPT, mode=0o755)
    # The folder of all sockets was removed: systemd-tmpfiles makes it at a boot only.
    node.run(["rm", "-r", "/run/brine/ctrl", "/run/brine/marks"])
    keys: dict[str, Any] = {
        "disks": [{"path": "/home/ann/disk"}, {"path": "/tmp/disk"}],
        "cdroms": ["/usr/share/medium.iso"],
        "nics": [{"mode": "routed", "ips": ["192.0.2.7"]}],
    }
    boot(node, "web1", **keys)
    folders = ["stat", "--format=%U:%G %a", "/run/brine/ctrl", "/run/brine/marks"]
    modes = node.run(folders).stdout.splitlines()
    assert modes == ["root:brine-ctrl 2770", "root:brine-kvmd 2775"]
    node.run(["brine", "instance", "stop", "web1"])
    calls = node.read("/var/lib/script-calls").split()
    assert calls == ["pre-up", "up", "down"]
    # A QEMU that stays root, and sees the node's files.
    boot(node, "web1", **keys, security_model="none", chroot=False)
    node.run(["brine", "instance", "stop", "web1"])
    define(node, "web1", disks=[{"path": "/etc/disk"}], **IDLE)
    assert "/etc/disk: can't be opened: Read-only file system" in refused(node, "start", "web1")
    node.shell("rm /etc/brine/nic.d/50-script /etc/disk")


def test_a_qemu_that_writes_without_end_leaves_the_journal_to_others(node: Node) -> None:
    define(node, "web1", extra_arguments=["-d", "in_asm"])
    node.run(["brine", "instance", "start", "web1"])
    counters = f"/proc/{info(node, 'web1')['pid']}/io"

    def has_written() -> bool:
        return int(node.read(counters).split()[3]) > 8 << 20  # wchar

    wait_for("a lot of output", has_written)
    node.run(["journalctl", "--sync"])
    lines = node.shell("journalctl --output=cat --unit=brine-instance@web1 | wc -l")
    assert 100 < int(lines) < 10 * 200


@pytest.mark.both_releases
def test_neither_an_upgrade_nor_another_systemd_touches_an_instance(
    node: Node, next_packages: list[Path]
) -> None:
    define(node, "kept1", nics=[{"link": "br0"}])
    start(node, "kept1")
    wait_watching(node, "kept1")
    before = info(node, "kept1")["pid"]
    for package in next_packages:
        node.put(package, f"/srv/next/{package.name}")
    changes = [
        # Those that are installed: a watcher would take the user's marker.
        ["bash", "-c", "dpkg --install --selected-only /srv/next/*.deb"],
        ["systemctl", "restart", "brine-kvmd"],
        ["systemctl", "daemon-reload"],
        ["systemctl", "daemon-reexec"],
        ["systemctl", "restart", "brine-instances.target"],
    ]
    for change in changes:
        node.run(change, timeout_s=300)
        found = info(node, "kept1")
        assert (found["pid"], found["status"], found["qemu"]) == (before, "running", "running")
    node.run(["brine", "nic", "add", "kept1", "--link", "br0"])
    order(node, "kept1", "poweroff")
    assert wait_verdict(node, "kept1")[0] == "user"
    wait_status(node, "kept1", "USER_down")
    assert left_of(node, "kept1") == {}


def test_renamed_and_undefined(node: Node) -> None:
    boot(node, "web1", nics=[{"link": "br0"}])
    assert "is running" in refused(node, "rename", "web1", "web2")
    assert "is running" in refused(node, "undefine", "web1")
    uuid = info(node, "web1")["uuid"]
    node.run(["brine", "instance", "stop", "web1"])
    verdicts = ["brine", "kvmd", "verdicts", "--json"]
    ends = json.loads(node.run(verdicts).stdout)
    node.run(["brine", "instance", "rename", "web1", "web2"])
    assert json.loads(node.run(verdicts).stdout) == ends
    assert info(node, "web2")["uuid"] == uuid
    assert "there is no such instance" in refused(node, "info", "web1")
    start(node, "web2")
    node.run(["brine", "instance", "stop", "web2"])
    node.run(["brine", "instance", "undefine", "web2"])
    assert node.run(["brine", "instance", "list"]).stdout.strip() == "no instance is defined"


def test_the_walk_of_a_command_names_what_it_enters(node: Node) -> None:
    boot_idle(node, "web1")
    found = walk(node, "nic", "add", "web1", "--link", "br0")
    assert "brine.hotplug.plug_nic" in found["files"]
    assert not [one for one in found["files"] if one.startswith(("brine.common", "brine.vm"))]
    assert found["changes_of_room"] > len(found["files"])
    (nic,) = json.loads(node.run(["brine", "nic", "list", "web1", "--json"]).stdout)
    assert nic["link"] == "br0"


_KILLED = """
import os, sys
from brine.common import cli
from brine.instance import store
def kill(*_):
    os._exit(9)
store.switch = kill
if sys.argv[1] == "clone":
    store.save = kill
cli.main(["instance", sys.argv[1], "web1", "web2"])
"""


@pytest.mark.parametrize("verb", ["rename", "clone"])
def test_what_a_kill_interrupted_is_settled_before_instances_start(node: Node, verb: str) -> None:
    node.shell("mkdir /srv/killed; truncate -s 1M /srv/killed/web1")
    define(node, "web1", disks=[{"path": "/srv/killed/web1", "format": "raw"}], **IDLE)
    before = node.shell("cat /var/lib/brine/instances/web1.json")
    done = node.run(["python3", "-c", _KILLED, verb], check=False)
    assert done.returncode == 9, done.stderr
    (row,) = json.loads(node.run(["brine", "operations", "list", "--json"]).stdout)
    keys = {row["key"], *row["also"]}
    assert (row["kind"], row["in_progress"]) == (verb, False)
    assert keys == ({"instance/web1", "instance/web2"} if verb == "rename" else {"instance/web2"})
    node.run(["systemctl", "start", "brine-operations.service"])
    assert node.run(["brine", "operations", "list"]).stdout == "no operation is pending\n"
    assert node.shell("cat /var/lib/brine/instances/*.json") == before
    assert node.shell("ls /srv/killed /var/lib/brine/operations").split() == [
        *("/srv/killed:", "web1", "/var/lib/brine/operations:")
    ]
    assert node.shell("systemctl is-enabled brine-operations").strip() == "enabled"
    node.shell("brine instance undefine web1; rm -r /srv/killed")


BIOS = "/usr/share/seabios/bios.bin"

_PARAMETERS: dict[str, tuple[Any, Callable[[list[str]], bool]]] = {
    "machine": ("q35", lambda args: option(args, "-machine")[0].startswith("pc-q35-")),
    "cpu": ("qemu64", lambda args: option(args, "-cpu") == ["qemu64"]),
    "vcpus": (2, lambda args: option(args, "-smp")[0].split(",")[0] == "2"),
    "memory_mib": (160, lambda args: option(args, "-m") == ["160M"]),
    "append": ("console=ttyS0 x", lambda args: option(args, "-append") == ["console=ttyS0 x"]),
    "rtc": ("localtime", lambda args: option(args, "-rtc") == ["base=localtime"]),
    "reboot_behavior": ("exit", lambda args: "reboot=shutdown" in str(option(args, "-action"))),
    "memory_lock": (True, lambda args: option(args, "-overcommit") == ["mem-lock=on"]),
    "extra_arguments": (["-k", "de"], lambda args: args[-2:] == ["-k", "de"]),
    "serial_console": (False, lambda args: not option(args, "-serial")),
    "guest_agent": (False, lambda args: not any("guest_agent" in word for word in args)),
    "usb_tablet": (True, lambda args: any("usb-tablet" in word for word in args)),
    "vnc_bind": ("127.0.0.1", lambda args: option(args, "-vnc")[:1] == ["127.0.0.1:0,to=99"]),
    "cdroms": ([f"{GUEST}/kernel"], lambda args: any('"ide-cd"' in word for word in args)),
}


def test_each_parameter_changes_what_qemu_runs(node: Node) -> None:
    # As root, since this machine may not let others lock so much memory.
    define(node, "plain", security_model="none")
    define(
        node,
        "other",
        security_model="none",
        **{key: value for key, (value, _) in _PARAMETERS.items()},
    )
    for name in ("plain", "other"):
        node.run(["brine", "instance", "start", name])
    plain, other = command_line(node, "plain"), command_line(node, "other")
    found = {key: (changed(plain), changed(other)) for key, (_, changed) in _PARAMETERS.items()}
    assert found == dict.fromkeys(_PARAMETERS, (False, True))


@pytest.mark.both_releases
def test_an_upgrade_of_qemu_would_not_change_the_guests_hardware(node: Node) -> None:
    define(node, "web1", machine="pc")
    start(node, "web1")
    machine = info(node, "web1")["spec"]["machine"]
    assert re.fullmatch(r"pc-i440fx-[\d.]+", machine)
    assert qmp(node, "web1", "qom-get", path="/machine", property="type") == f"{machine}-machine"
    assert info(node, "web1")["restart_pending"] == []
    define(node, "web1", machine="pc")
    assert info(node, "web1")["spec"]["machine"] == machine
    assert "restart pending" not in node.run(["brine", "instance", "list"]).stdout


def test_a_firmware_takes_the_place_of_a_kernel(node: Node) -> None:
    define(node, "web1", kernel="", initrd="", append="", firmware=BIOS)
    node.run(["brine", "instance", "start", "web1"])
    arguments = command_line(node, "web1")
    assert option(arguments, "-bios")[0].startswith("/proc/self/fd/")
    assert not option(arguments, "-kernel")


@pytest.mark.both_releases
def test_what_qemu_itself_says_of_its_parameters(node: Node) -> None:
    keys = {"vcpus": 2, "cores": 2, "acpi": False, "usb_tablet": True, "memory_mib": 160}
    boot(node, "web1", **keys, boot_order=["network"], nics=[{"link": "br0", "queues": 2}])
    assert qmp(node, "web1", "query-memory-size-summary")["base-memory"] == 160 << 20
    cpus = [one["props"] for one in qmp(node, "web1", "query-cpus-fast")]
    assert [(one["socket-id"], one["core-id"]) for one in cpus] == [(0, 0), (0, 1)]
    assert qmp(node, "web1", "query-uuid")["UUID"] == info(node, "web1")["uuid"]
    assert qmp(node, "web1", "qom-get", path="/machine", property="acpi") == "off"
    assert any("Tablet" in mouse["name"] for mouse in qmp(node, "web1", "query-mice"))
    (nic,) = json.loads(node.run(["brine", "nic", "list", "web1", "--json"]).stdout)
    path = f"/machine/peripheral/{nic['device_id']}"
    assert qmp(node, "web1", "qom-get", path=path, property="mq") is True


def _read_until(
    descriptor: int, wanted: bytes, *, typed: bytes = b"", timeout_s: float = 30
) -> bytes:
    """The first output of a terminal, into which the same text is typed again and again."""
    heard = b""
    deadline = time.monotonic() + timeout_s
    while wanted not in heard:
        assert time.monotonic() < deadline, heard
        os.write(descriptor, typed)
        while wanted not in heard and select.select([descriptor], [], [], 3)[0]:
            heard += os.read(descriptor, 4096)
    return heard
