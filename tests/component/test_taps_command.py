"""`brine tap` as a person uses it, on a node whose folders and network are the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from brine.vm.vif import tap_name

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="networks take root")

NAME = tap_name("web1", "0")

# The folders of a node, empty, and a bridge.
PREPARE = """set -e
for folder in /run /etc; do mount -t tmpfs tmpfs $folder; done
mkdir -p /etc/brine/nic.d
ip link add br0 type bridge
brine() { "$PYTHON" -c '
import sys
from brine.common import cli
entry = cli.EntryPoint("tap", "brine.hotplug.cli:TAP")
cli.entry_points = lambda group: [entry] * (group == "brine.commands")
sys.exit(cli.main())' "$@"; }
"""


def on_a_node(script: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", PREPARE + script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_up_list_and_down() -> None:
    done = on_a_node(
        "brine tap list; brine tap up --instance web1 --link br0 --mtu 1400\n"
        "brine tap up --instance web1 --link br0 --mtu 1400; brine tap list\n"
        "brine tap list --json >&2; brine tap gc\n"
        "brine tap gc --all --dry-run; brine tap gc --all\n"
        "brine tap down --instance web1; brine tap down --instance web1"
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "no taps"
    assert lines[1] == f"up: {NAME}, bridged to br0, MTU 1400"
    assert lines[2] == f"unchanged: {NAME}, bridged to br0, MTU 1400"
    assert lines[3].split() == ["NAME", "INSTANCE", "NIC", "STATE", "WIRING", "IP", "MTU"]
    assert lines[4].split() == [NAME, "web1", "0", "waiting", "bridged", "to", "br0", "-", "1400"]
    assert lines[5] == "nothing is left over"
    said = f"tap {NAME}, NIC 0 of web1: no process has it open"
    assert lines[6:8] == [f"would remove: {said}", f"removed: {said}"]
    assert lines[8:] == [f"unchanged: {NAME} is not there"] * 2
    assert json.loads(done.stderr) == [
        {
            "name": NAME,
            "instance": "web1",
            "nic": "0",
            "state": "waiting",
            "mode": "bridged",
            "link": "br0",
            "vlan": "",
            "ips": [],
            "mtu": 1400,
            "filter": "none",
            "drops": None,
            "holders": [],
        }
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "error", "hint"),
    [
        ("up web --link br9", 1, "there is no bridge br9", "BRIDGES"),
        ("up web --mode routed", 2, "a routed NIC needs its address", "give --ip ADDRESS"),
        ("down br0", 1, "tap br0: is none of ours, and is left alone", "see ip -d link show br0"),
        ("up web --queues 0", 2, "argument --queues: must be from 1 to 256, but is '0'", ""),
    ],
)
def test_a_failure_is_one_line_and_a_hint(
    arguments: str, status: int, error: str, hint: str
) -> None:
    done = on_a_node(f"brine tap {arguments}")
    assert done.returncode == status
    assert done.stdout == ""
    first, *rest = done.stderr.splitlines()
    assert first == f"brine: error: {error}"
    assert hint in "".join(rest)


def test_a_script_that_others_may_write_is_warned_of_and_not_run() -> None:
    done = on_a_node(
        "echo 'exit 1' >/etc/brine/nic.d/bad; chmod 777 /etc/brine/nic.d/bad\n"
        "brine tap up --instance web1 --link br0 && brine tap down --instance web1"
    )
    assert done.stdout.splitlines()[-1] == f"down: {NAME}"
    warning = "brine: warning: /etc/brine/nic.d/bad is not run: others than root may write"
    assert done.stderr.splitlines()[0].startswith(warning)
