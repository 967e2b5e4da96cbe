"""Nodes that run instances of Brine's, and what tests ask of these."""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from lab.errors import LabError
from lab.guest import result_in, run_order
from lab.guest_image import KERNEL_OPTIONS, guest_image
from lab.node import Node, boot_node
from lab.qmp import Qmp
from lab.repository import publish
from lab.waiting import wait_for

T = TypeVar("T")

_READY_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 60.0

# The node installs nothing that is only recommended.
PARTS = ["brine-instance", "brine-kvmd"]

UNITS = Path("/run/systemd/system")
GUEST = Path("/srv/guest")
DISKS = Path("/srv/disks")
FOLDER = "/srv/vms"
"""A storage unit of nodes whose pillar names it."""

SMALLEST = {
    "accel": "tcg",
    "memory_mib": 128,
    "kernel": f"{GUEST}/kernel",
    "initrd": f"{GUEST}/initramfs",
    "append": f"console=ttyS0 {KERNEL_OPTIONS}",
    "shutdown_timeout": 60,
}
"""The keys of a guest that boots in seconds, and obeys orders on its serial line."""

IDLE = {"extra_arguments": ["-S"], "shutdown_timeout": 1}
"""Besides those: of one that is stopped before its first instruction, and takes no processor."""


class _SilentError(LabError):
    """A guest does not say that it is ready."""


@contextmanager
def node_with_instances(
    release: str, packages: Iterable[Path], *, keeps_files: bool = False
) -> Iterator[Node]:
    """A node that has brine-instance, a bridge, a guest to boot, and folders for disks.

    With `keeps_files` it can reboot, but the bridge is gone then.
    """
    with boot_node(release, keeps_files=keeps_files) as node:
        publish(node, packages)
        node.run(["apt-get", "install", "--yes", "--quiet=2", *PARTS], timeout_s=300)
        node.put(guest_image().folder, GUEST)
        node.shell(f"mkdir {DISKS}; ip link add br0 type bridge; ip link set br0 up")
        yield node


def define(node: Node, name: str, **keys: Any) -> None:
    """Define an instance with SMALLEST and these keys."""
    spec = {"name": name, **SMALLEST, **keys}
    node.run(["brine", "instance", "define", "-"], stdin=json.dumps(spec))


def define_copies(node: Node, name: str, others: Iterable[str]) -> None:
    """Define instances that are as another one, without a command for each."""
    folder = Path("/var/lib/brine/instances")
    spec = json.loads(node.read(folder / f"{name}.json"))
    for other in others:
        copied = {**spec, "name": other, "uuid": str(uuid.uuid4())}
        node.write(folder / f"{other}.json", json.dumps(copied))


def start(node: Node, name: str) -> None:
    """Start an instance, and wait until its guest obeys orders."""
    node.run(["brine", "instance", "start", name])
    wait_ready(node, name)


def boot(node: Node, name: str, **keys: Any) -> None:
    """Define and start an instance, and wait until its guest obeys orders."""
    define(node, name, **keys)
    start(node, name)


def boot_idle(node: Node, name: str, **keys: Any) -> None:
    """Define and start an instance that takes no processor."""
    define(node, name, **{**IDLE, **keys})
    node.run(["brine", "instance", "start", name])


@contextmanager
def held_back(node: Node, name: str, step: str = "ExecStartPre") -> Iterator[None]:
    """Have an instance's unit not come to the end of its start meanwhile.

    :param step: of the start, at which it waits: before or after QEMU is there.
    """
    drop_in = UNITS / f"brine-instance@{name}.service.d/slow.conf"
    file = f"/run/{name}-held-back"
    wait = f"/bin/sh -c 'while [ -e {file} ]; do sleep 0.1; done'"
    node.write(drop_in, f"[Service]\n{step}={wait}\n")
    node.run(["systemctl", "daemon-reload"])
    node.write(file, "")
    try:
        yield
    finally:
        node.path(file).unlink()


def wait_ready(node: Node, name: str) -> None:
    """Wait until an instance's guest obeys orders. Raises LabError when it ends or takes too long,
    and again too long after a reset."""
    try:
        _wait_ready(node, name)
    except _SilentError:
        # An emulated one has been seen to stand still while it boots, once in a thousand times.
        node.run(["brine", "instance", "reboot", "--reset", name])
        _wait_ready(node, name)


def _wait_ready(node: Node, name: str) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    heard = b""
    with serial_line(node, name) as line:
        line.settimeout(1)
        while b"guest: ready" not in heard:
            if time.monotonic() >= deadline:
                raise _SilentError(f"{name} is not ready; it said {heard!r}")
            # It says so once by itself, perhaps before anybody listened.
            # What a slow one has not read yet stands in the way of more.
            with suppress(TimeoutError):
                line.sendall(b"hello\n")
                if not (said := line.recv(4096)):
                    raise LabError(f"{name} has ended; it said {heard!r}")
                heard += said


def order(node: Node, name: str, text: str) -> None:
    """Give an instance's guest an order that ends it; see guest-init.sh."""
    with serial_line(node, name) as line:
        for _ in range(12):
            line.settimeout(5)
            # What the guest has not read when we leave is lost.
            try:
                # Who had the line before may have left half an order on it.
                line.sendall(f"\n{text}\n".encode())
                while line.recv(4096):
                    pass
            except TimeoutError:
                continue
            except ConnectionError:
                pass  # it has ended, with something unread
            return
    raise LabError(f"{name} did not follow the order {text}")


def run_in_guest(node: Node, name: str, command: str) -> str:
    """Run a shell command in an instance's guest, which must be ready; return what it wrote."""
    mark = f"command-{uuid.uuid4().hex[:8]}"
    result = answer(node, name, run_order(mark, command), partial(result_in, mark=mark))
    status, output = result
    if status != 0:
        raise LabError(f"{name}: {command}: failed with {status}\n{output}")
    return output


def answer(node: Node, name: str, text: str, answer_in: Callable[[bytes], T | None]) -> T:
    """The answer of an instance's guest to an order, which is repeated until then."""
    heard = b""
    deadline = time.monotonic() + _ANSWER_TIMEOUT_S
    with serial_line(node, name) as line:
        line.settimeout(5)
        while time.monotonic() < deadline:
            # Who had the line before may have left half an order on it.
            line.sendall(f"\n{text}\n".encode())
            with suppress(TimeoutError):
                while not (found := answer_in(heard.replace(b"\r\n", b"\n"))):
                    if not (said := line.recv(4096)):
                        raise LabError(f"{name} has ended; it said {heard!r}")
                    heard += said
                return found
    raise LabError(f"{name}: {text}: no answer, but {heard!r}")


@contextmanager
def serial_line(node: Node, name: str) -> Iterator[socket.socket]:
    """A connection to an instance's serial line; LabError where it is not there, or takes nothing
    more."""
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(node.path(f"/run/brine/ctrl/{name}.serial")))
            yield line
    except OSError as error:
        raise LabError(f"{name}: its serial line fails: {error}") from error


def qmp(node: Node, name: str, command: str, **arguments: Any) -> Any:
    """The answer of an instance's QEMU."""
    with Qmp(node.path(f"/run/brine/ctrl/{name}.qmp")) as client:
        return client.command(command, **arguments)


def info(node: Node, name: str) -> dict[str, Any]:
    """The output of `brine instance info` for an instance."""
    found: dict[str, Any] = json.loads(
        node.run(["brine", "instance", "info", name, "--json"]).stdout
    )
    return found


def add_by_hand(node: Node, name: str, *wiring: str) -> str:
    """Add a disk in FOLDER, with something on it, and a NIC to an instance without disks, which no
    declaration has; returns the MAC address of the NIC."""
    size = ["--size", "4M", "--unit", FOLDER, "--name", "hand"]
    node.run(["brine", "disk", "add", name, *size])
    told = node.run(["brine", "nic", "add", name, *wiring, "--json"]).stdout
    written = "echo by hand | dd of=/dev/vda conv=notrunc,fsync 2>/dev/null"
    run_in_guest(node, name, f"until [ -b /dev/vda ]; do sleep 1; done; {written}")
    return str(json.loads(told)["mac"])


def expect_by_hand(node: Node, name: str, mac: str) -> None:
    """The guest has both, and no declaration has taken one for its own."""
    found = info(node, name)
    for place in (found, found["spec"]):
        assert [one["by_hand"] for one in place["disks"]] == [True]
        assert [one["mac"] for one in place["nics"] if one["by_hand"]] == [mac]
    assert found["restart_pending"] == []
    assert run_in_guest(node, name, "head -c 7 /dev/vda") == "by hand"
    assert mac in run_in_guest(node, name, "cat /sys/class/net/*/address")


def wait_status(node: Node, name: str, status: str) -> dict[str, Any]:
    """Wait until an instance has a status; return all that is said of it."""

    def reached() -> dict[str, Any] | None:
        found = info(node, name)
        return found if found["status"] == status else None

    found = wait_for(f"{name} to be {status}", reached, timeout_s=60, interval_s=0.2)
    assert found
    return found


def started_between(node: Node, name: str) -> tuple[int, int]:
    """When the last start of an instance began and ended, in µs of the monotonic clock."""
    moments = ["InactiveExitTimestampMonotonic", "ActiveEnterTimestampMonotonic"]
    command = ["systemctl", "show", f"--property={','.join(moments)}"]
    lines = node.run([*command, f"brine-instance@{name}"]).stdout.splitlines()
    values = dict(line.split("=") for line in lines)
    return int(values[moments[0]]), int(values[moments[1]])


def command_line(node: Node, name: str) -> list[str]:
    """The command line that an instance's QEMU runs with, as the kernel has it."""
    pid = info(node, name)["pid"]
    return node.run(["cat", f"/proc/{pid}/cmdline"]).stdout.rstrip("\0").split("\0")


def option(arguments: list[str], name: str) -> list[str]:
    """The values of an option that may be there several times."""
    return [value for key, value in pairwise(arguments) if key == name]


def left_of(node: Node, name: str) -> dict[str, str]:
    """The leftovers of an instance that does not run; there should be none."""
    found = {
        "sockets": f"ls /run/brine/ctrl | grep -E '^{name}[.](qmp|kvmd|serial|agent)$'",
        "taps": f"ip -o link | grep 'brine instance={name} '",
        "records": f"""grep -l '"instance": "{name}"' -r /run/brine/taps""",
        "processes": f"pgrep -f '[g]uest={name},'",
        "user ids": "ls /run/lock/brine | grep ^uid-",
        "control groups": f"ls -d /sys/fs/cgroup/machine.slice/brine-instance@{name}.service",
    }
    script = "".join(f"echo '{what}:' $({command} || :);" for what, command in found.items())
    lines = [line.partition(":") for line in node.shell(script).splitlines()]
    return {what: text.strip() for what, _, text in lines if text.strip()}
