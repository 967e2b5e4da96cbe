"""What the kernel ends for want of memory has crashed: on Debian's own kernel, which dom0 runs.

There systemd hears of the kill before the process has given its memory back.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from lab.xen_node import XenNode
from xen.instances_on_xen import LONG_S, states, unit_says, wait_status, watch

pytestmark = [
    pytest.mark.long,  # packages are unpacked on an emulated node
    pytest.mark.usefixtures("no_instances"),
    pytest.mark.parametrize("release", ["trixie"], scope="session"),
]

# It answers as QEMU does, and takes its memory when it is told to run on.
LARGE = """#!/usr/bin/python3
import json, mmap, socket, sys, threading

def say(peer, **what):
    peer.sendall(json.dumps(what).encode() + b"\\r\\n")

def serve(listener):
    while True:
        peer, _ = listener.accept()
        with peer:
            try:
                converse(peer)
            except OSError:
                pass  # it only looked whether somebody listens

def converse(peer):
    version = {"qemu": {"major": 10, "minor": 0, "micro": 0}, "package": ""}
    say(peer, QMP={"version": version, "capabilities": []})
    for line in peer.makefile("rb"):
        asked = json.loads(line)
        if asked["execute"] == "cont":
            threading.Thread(target=grow).start()
        answer = {"status": "running"} if asked["execute"] == "query-status" else {}
        say(peer, **{"return": answer, "id": asked.get("id")})

def grow():
    memory = mmap.mmap(-1, 512 << 20)
    while True:
        memory.write(b"x" * (1 << 20))

for value in sys.argv:
    path, _, option = value.removeprefix("unix:").partition(",")
    if value.startswith("unix:") and "server=on" in option:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        threading.Thread(target=serve, args=(listener,)).start()
"""
LIMIT = "[Service]\nMemoryMax=300M\nMemorySwapMax=0\n"
CONTINUE = (
    "import socket\n"
    "peer = socket.socket(socket.AF_UNIX)\n"
    "peer.connect('/run/brine/ctrl/large1.qmp')\n"
    'peer.sendall(b\'{"execute": "cont"}\\n\')\n'
    "peer.recv(9999)\n"
)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("", "signal 9"),  # as the unit is shipped
        # systemd's default, by a drop-in: it runs ExecStop while the process still dies.
        ("OOMPolicy=stop\n", "the kernel ended it for want of memory"),
    ],
    ids=["continue", "stop"],
)
def test_one_that_the_kernel_kills_for_want_of_memory_comes_back(
    node: XenNode, policy: str, why: str
) -> None:
    node.write("/srv/large", LARGE, mode=0o755)
    node.write("/run/systemd/system/brine-instance@large1.service.d/limit.conf", f"{LIMIT}{policy}")
    node.run(["systemctl", "daemon-reload"])
    spec: dict[str, Any] = {
        "name": "large1",
        "qemu": "/srv/large",
        "accel": "tcg",
        "admin_state": "up",
    }
    spec |= {"security_model": "none", "chroot": False, "memory_mib": 64, "kernel": "/srv/large"}
    node.run(["brine", "instance", "define", "-"], stdin=json.dumps(spec), timeout_s=LONG_S)
    node.run(["brine", "instance", "start", "large1"], timeout_s=LONG_S)
    before = unit_says(node, "large1", "MainPID")
    node.run(["python3", "-c", CONTINUE])
    found = wait_status(node, ["large1"], "ERROR_down")["large1"]
    killed = node.shell("journalctl -k --grep 'Memory cgroup out of memory' -o cat")
    assert f"Killed process {before} " in killed
    assert why in found["why"]
    assert watch(node)["large1"]["actions"] == ["try"]
    assert states(node)["large1"]["status"] == "running"
