"""What is measured alone: how commands start, and how a tap is made."""

import time
from collections.abc import Callable, Sequence

from bench.commands import timed
from bench.hotplug import bare_tap
from bench.hotplug.names import (
    PASS,
    TAP_BARE,
    TAP_COMMAND,
    TAP_IP,
    TAP_LIBRARY,
    USUAL,
    VIRSH_VERSION,
    WITHOUT_NETLINK,
)
from bench.hotplug.results import Plan
from brine.hotplug.choices import Mode
from brine.hotplug.net.tap import open_tap
from brine.hotplug.net.wiring import unwire, wire
from brine.hotplug.nic import Nic

_PYTHON = "/usr/bin/python3"  # the interpreter that the package's commands name
_TAP = "bench1"


def of_starts(plan: Plan) -> dict[str, Callable[[], float]]:
    """How long interpreters and commands take that do nothing, or little."""
    lines: dict[str, Sequence[str]] = {
        PASS: [_PYTHON, "-c", "pass"],
        USUAL: [_PYTHON, "-c", USUAL],
        VIRSH_VERSION: VIRSH_VERSION.split(),
    }
    for line in WITHOUT_NETLINK:
        lines[line] = [*line.split(), plan.qmp] if line.endswith("--qmp") else line.split()
    return {name: _command(line) for name, line in lines.items()}


def of_taps(plan: Plan) -> dict[str, Callable[[], float]]:
    """How long it takes to make a tap, a port of the bridge, and up; its end does not count."""
    wiring = Nic(_TAP, "0", Mode.BRIDGED, plan.bridge)

    def library() -> float:
        began_at = time.perf_counter()
        with open_tap(_TAP) as tap:
            wire(tap, wiring)
            took_s = time.perf_counter() - began_at
            unwire(tap)
        return took_s

    def bare() -> float:
        began_at = time.perf_counter()
        with bare_tap.tap(_TAP):
            bare_tap.connect(_TAP, plan.bridge)
            return time.perf_counter() - began_at

    def command() -> float:
        took_s = timed(["brine", "tap", "up", _TAP, "--link", plan.bridge])
        timed(["brine", "tap", "down", _TAP])
        return took_s

    def ip() -> float:
        took_s = timed(
            ["ip", "tuntap", "add", _TAP, "mode", "tap"],
            ["ip", "link", "set", _TAP, "master", plan.bridge, "up"],
        )
        timed(["ip", "link", "delete", _TAP])
        return took_s

    return {TAP_LIBRARY: library, TAP_BARE: bare, TAP_COMMAND: command, TAP_IP: ip}


def _command(line: Sequence[str]) -> Callable[[], float]:
    return lambda: timed(line)
