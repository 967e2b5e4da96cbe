"""``brine node state``: what a reboot of this node changes, and what has to be there after it."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from brine.common.cli import print_json
from brine.common.errors import BrineError, printable
from brine.common.process import run_bounded

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_KERNELS_DIR = Path("/boot")
_TIMEOUT_S = 30.0
_READY = frozenset({"running", "listening", "waiting"})
"""The states of units that do their work, or wait for some: services, sockets and paths, timers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node as a reboot finds or leaves it.

    :param boot_id: the kernel's: another one after each boot.
    :param kernel: the release that runs.
    :param newest: that of the newest installed kernel of its flavour; empty if the one that runs is
        not among those in ``/boot``, as in a container.
    :param daemons: the names of Brine's units that the boot starts, and that run or wait for
        something. Others run while they are needed: the KVM daemon, while there are VMs.
    :param failed: the names of all units that have failed.
    """

    boot_id: str
    kernel: str
    newest: str
    daemons: tuple[str, ...]
    failed: tuple[str, ...]


def print_state(arguments: argparse.Namespace) -> int:
    """``brine node state``."""
    found = state_of_node()
    if arguments.json:
        print_json(asdict(found))
        return 0
    print(f"Boot:     {found.boot_id}")
    print(f"Kernel:   {printable(found.kernel)}")
    if found.newest not in ("", found.kernel):
        print(f"Newest:   {printable(found.newest)}, which the next boot takes")
    print(f"Daemons:  {', '.join(found.daemons) or 'none'}")
    print(f"Failed:   {printable(', '.join(found.failed)) or 'none'}")
    return 0


def state_of_node() -> NodeState:
    """:raises BrineError: if systemd does not answer."""
    kernel = os.uname().release
    units, at_boot = [*_units()], _enabled_units()
    return NodeState(
        boot_id=_BOOT_ID_FILE.read_text().strip(),
        kernel=kernel,
        newest=newest_kernel(kernel, (one.name for one in _KERNELS_DIR.glob("vmlinuz-*"))),
        daemons=tuple(sorted(name for name, _, sub in units if name in at_boot and sub in _READY)),
        failed=tuple(sorted(name for name, active, _ in units if active == "failed")),
    )


def newest_kernel(running: str, files: Iterable[str]) -> str:
    """The newest kernel of the flavour that runs.

    Example::

        newest_kernel("6.1.0-9-amd64", ["vmlinuz-6.1.0-9-amd64", "vmlinuz-6.1.0-28-amd64"])

    :param files: the names in ``/boot``, such as ``vmlinuz-6.1.0-28-amd64``. Rescue images and
        debugging variants have other flavours.
    """
    found = {name.removeprefix("vmlinuz-") for name in files}
    if running not in found:
        return ""
    flavour = _flavour_of(running)
    return max((one for one in found if _flavour_of(one) == flavour), key=_by_version)


def _flavour_of(release: str) -> str:
    """The words of a release after its numbers: ``cloud-amd64``, or nothing on Fedora's kin."""
    parts = release.split("-")
    variant = re.search(r"\+(?:debug|rt|64k)\S*$", release)
    is_rescue = "rescue" in parts
    words = [part for part in parts[1:] if not part[:1].isdigit()]
    return "-".join([*words, *((variant[0],) if variant else ()), *(("0",) if is_rescue else ())])


def _by_version(release: str) -> list[tuple[int, int, str]]:
    """A key that sorts releases: numbers as numbers, and a pre-release (``~``) before what it
    precedes."""
    parts = [*re.findall(r"\d+|[A-Za-z]+|~", release), ""]
    return [
        (1, int(part), "") if part.isdigit() else (-1 if part == "~" else 0, 0, part)
        for part in parts
    ]


def _units() -> Iterator[tuple[str, str, str]]:
    """The loaded units: name, active state, and the state below it."""
    for one in _listed("list-units", "--all"):
        yield one["unit"], one["active"], one["sub"]


def _enabled_units() -> set[str]:
    """The names of Brine's units that the node's boot starts."""
    found = _listed("list-unit-files", "brine-*")
    return {one["unit_file"] for one in found if one["state"] == "enabled"}


def _listed(verb: str, *more: str) -> list[dict[str, str]]:
    """:raises BrineError: if systemd does not answer."""
    command = ["systemctl", verb, *more, "--no-pager", "--output=json"]
    try:
        run = run_bounded(command, timeout_s=_TIMEOUT_S, environment=os.environ)
        rows: list[dict[str, str]] = json.loads(run.stdout)
    except (OSError, TimeoutError, ValueError) as error:
        raise BrineError(f"systemctl {verb}: {error}") from error
    return rows
