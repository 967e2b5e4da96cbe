"""Ports of Open vSwitch bridges, through its own command.

Open vSwitch's database survives a reboot, and ignores the end of an interface. So each port of
Brine's is marked with its owner.

Source: :manpage:`ovs-vsctl(8)`, :manpage:`ovs-vswitchd.conf.db(5)`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from brine.common.errors import BrineError
from brine.hotplug.nic import Vlans

if TYPE_CHECKING:
    import subprocess


_COMMAND = "ovs-vsctl"
_TIMEOUT_S = 10
_OWNER = "brine-owner"


class OpenVswitchError(BrineError):
    """Open vSwitch refused, or can't be asked."""


@dataclass(frozen=True)
class Port:
    """A port of Brine's; *owner* is the alias of the interface."""

    name: str
    owner: str


def installed() -> bool:
    """Whether Open vSwitch's command is installed."""
    import shutil

    return shutil.which(_COMMAND) is not None


def check_bridge(name: str) -> None:
    """Refuse a bridge that does not exist.

    :raises OpenVswitchError: if there is no such bridge, or no Open vSwitch.
    """
    if name not in _run(["list-br"]).split():
        raise OpenVswitchError(
            f"Open vSwitch has no bridge {name}", hint=f"ovs-vsctl add-br {name}"
        )


def bridge_of(port: str) -> str | None:
    """The bridge of a port; None if there is no such port."""
    done = _execute(["port-to-br", port])
    return done.stdout.strip() if done.returncode == 0 else None


def add_port(bridge: str, port: str, vlans: Vlans | None, owner: str) -> None:
    """Make an interface a port of a bridge, in these VLANs; succeeds if it is one already.

    :param vlans: None is Open vSwitch's default: a port for frames of all VLANs.
    :raises OpenVswitchError: if there is no such bridge, or Open vSwitch refuses.
    """
    # A port of another bridge moves; without this, Open vSwitch would refuse it.
    if bridge_of(port) not in (None, bridge):
        remove_port(port)
    columns = _columns(vlans)
    _run(
        [
            *("--may-exist", "add-port", bridge, port),
            *("--", "clear", "Port", port, "tag", "trunks", "vlan_mode"),
            *(("--", "set", "Port", port, *columns) if columns else ()),
            *("--", "set", "Interface", port, f"external_ids:{_OWNER}={_quoted(owner)}"),
        ]
    )


def remove_port(port: str) -> None:
    """Remove a port from its bridge; succeeds if there is none."""
    _run(["--if-exists", "del-port", port])


def our_ports() -> list[Port]:
    """All ports of Brine's, also those whose interface is gone."""
    columns = ["--columns=name,external_ids", "list", "Interface"]
    table = json.loads(_run(["--format=json", *columns]))
    found = []
    for name, (_, pairs) in table["data"]:
        owner = dict(pairs).get(_OWNER)
        if owner is not None:
            found.append(Port(name, owner))
    return found


def _columns(vlans: Vlans | None) -> list[str]:
    if vlans is None:
        return []
    trunks = ",".join(map(str, sorted(vlans.tagged)))
    if vlans.untagged is None:
        return ["vlan_mode=trunk", f"trunks={trunks}"]
    if not vlans.tagged:
        return ["vlan_mode=access", f"tag={vlans.untagged}"]
    return ["vlan_mode=native-untagged", f"tag={vlans.untagged}", f"trunks={trunks}"]


def _quoted(text: str) -> str:
    # Quoted as the database's string, so that no character has a special meaning.
    return json.dumps(text, ensure_ascii=False)


def _run(arguments: Sequence[str]) -> str:
    done = _execute(arguments)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise OpenVswitchError(
            f"Open vSwitch: {lines[-1].removeprefix('ovs-vsctl: ')}",
            hint="see ovs-vsctl show, and systemctl status openvswitch-switch",
        )
    return done.stdout


def _execute(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    import subprocess  # takes long to load, and few nodes have Open vSwitch

    command = [_COMMAND, f"--timeout={_TIMEOUT_S}", *arguments]
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=2 * _TIMEOUT_S,
        )
    except FileNotFoundError:
        raise OpenVswitchError(
            f"Open vSwitch's command {_COMMAND} is not there",
            hint="install openvswitch-switch, or use another mode",
        ) from None
    except subprocess.TimeoutExpired:
        raise OpenVswitchError(
            f"Open vSwitch does not answer within {2 * _TIMEOUT_S} s",
            hint="see systemctl status openvswitch-switch",
        ) from None
