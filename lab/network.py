"""A network of nodes: a bridge of the host that nothing else is on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.command import run_command
from lab.machine import Machine, require_commands, require_root

# The kernel takes 15 characters.
_PREFIX = "brl"
_numbers = itertools.count()


@contextmanager
def bridge() -> Iterator[str]:
    """A bridge for `boot_node(network_bridge=...)`; gone with the context.

    Bridges that killed programs left are removed first.
    """
    require_root("a network of nodes")
    require_commands("a network of nodes", ["ip"])
    for dead in _left_over():
        run_command(["ip", "link", "delete", dead], check=False)
    name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
    run_command(["ip", "link", "add", name, "type", "bridge"])
    try:
        # Without ARP: the host would answer for addresses of its own, which may be a node's here.
        run_command(["ip", "link", "set", name, "arp", "off", "up"])
        yield name
    finally:
        run_command(["ip", "link", "delete", name])


def give_addresses(node: Machine, *addresses: str) -> None:
    """Have a node on a bridge use `addresses`, each with the length of its prefix."""
    node.run(["ip", "link", "set", "host0", "up"])
    for address in addresses:
        # At once, without asking first whether another has it.
        node.run(["ip", "address", "add", address, "dev", "host0", *_no_detection(address)])


def _no_detection(address: str) -> list[str]:
    return ["nodad"] if ":" in address else []


def _left_over() -> Iterator[str]:
    for path in Path("/sys/class/net").glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            yield path.name
