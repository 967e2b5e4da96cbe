"""Small Xen domains that do what they are told, on a Xen node."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lab.errors import LabError
from lab.waiting import wait_for
from lab.xen_image import DOMAIN_FOLDER, DOMAIN_LOGS
from lab.xen_node import LONGEST_S, XenNode

# Debian's kernel lies at 16 MiB, and takes 48 there. Its self tests take some more, side by side.
MEMORY_MIB = 80
READY = "domain: ready"
_PANIC = "Kernel panic"
_CONFIGS = "/srv/domains"


@dataclass(frozen=True)
class Row:
    """One row of `xl list`; the state is as Xen writes it, such as `-b----`."""

    name: str
    number: int
    memory_mib: int
    state: str


def rows(node: XenNode) -> list[Row]:
    """The rows of `xl list` without dom0."""
    lines = node.run(["xl", "list"]).stdout.splitlines()[1:]
    fields = [line.split() for line in lines]
    found = [Row(name, int(number), int(mib), state) for name, number, mib, _, state, _ in fields]
    return [row for row in found if row.number]


def state_of(node: XenNode, name: str) -> str:
    """The state of the domain with this name; empty when there is none."""
    return next((row.state for row in rows(node) if row.name == name), "")


def free_memory_mib(node: XenNode) -> int:
    """The memory that Xen has to give."""
    found = re.search(r"^free_memory +: (\d+)", node.run(["xl", "info"]).stdout, re.MULTILINE)
    assert found
    return int(found[1])


def configuration(
    name: str, *, kind: str = "pv", memory_mib: int = MEMORY_MIB, **settings: str
) -> str:
    """An xl.cfg(5) of a domain that obeys orders.

    Its end is preserved, however it ends; `settings` are more keys, such as `on_reboot`, or others
    for these. `kind` is `pv` or `pvh`.
    """
    keys: Mapping[str, str | int] = {
        "name": name,
        "type": kind,
        "kernel": f"{DOMAIN_FOLDER}/kernel",
        "ramdisk": f"{DOMAIN_FOLDER}/initramfs",
        "cmdline": "console=hvc0 quiet mitigations=off",
        "memory": memory_mib,
        "vcpus": 1,
        "on_poweroff": "preserve",
        "on_reboot": "restart",
        "on_crash": "preserve",
        **settings,
    }
    values = {
        key: str(value) if isinstance(value, int) else f'"{value}"' for key, value in keys.items()
    }
    return "".join(f"{key} = {value}\n" for key, value in values.items())


def create(
    node: XenNode,
    name: str,
    *options: str,
    kind: str = "pv",
    memory_mib: int = MEMORY_MIB,
    **settings: str,
) -> None:
    """Write a domain's configuration, and have `xl create` make it, with these options."""
    file = f"{_CONFIGS}/{name}.cfg"
    node.write(file, configuration(name, kind=kind, memory_mib=memory_mib, **settings))
    node.run(["rm", "-f", f"{DOMAIN_LOGS}/guest-{name}.log"])
    node.run(["xl", "create", *options, file], timeout_s=LONGEST_S)


def log(node: XenNode, name: str) -> str:
    """A domain's output on its console."""
    return node.run(["cat", f"{DOMAIN_LOGS}/guest-{name}.log"], check=False).stdout


def wait_ready(node: XenNode, name: str, *, timeout_s: float = LONGEST_S) -> None:
    """Wait until a domain obeys orders; raises LabError, with what it said, when it does not."""

    def is_ready() -> bool:
        said = log(node, name)
        if READY not in said and _PANIC in said:
            raise LabError(f"domain {name} does not get ready")
        return READY in said

    try:
        wait_for(f"domain {name}", is_ready, timeout_s=timeout_s)
    except LabError as error:
        raise LabError(f"{error}\n{log(node, name)}") from None


def order(node: XenNode, name: str, text: str) -> None:
    """Tell a domain to `poweroff`, `reboot`, `crash`, be `busy`, or be `deaf` to `xl shutdown`."""
    script = 'tty=$(xenstore-read "/local/domain/$(xl domid "$1")/console/tty"); echo "$2" >"$tty"'
    node.run(["sh", "-ec", script, "sh", name, text])


def wait_state(node: XenNode, name: str, pattern: str, *, timeout_s: float = LONGEST_S) -> str:
    """Wait until the state of a domain matches a regular expression; return it."""

    def matching() -> str:
        state = state_of(node, name)
        return state if re.fullmatch(pattern, state) else ""

    return wait_for(f"domain {name} in state {pattern}", matching, timeout_s=timeout_s)
