"""Ports of Open vSwitch bridges, through its own command.

Open vSwitch's database survives a reboot, and ignores the end of an interface. So each port of
Brine's is marked with its owner.

Source: :manpage:`ovs-vsctl(8)`, :manpage:`ovs-vswitchd.conf.db(5)`.
"""

from __future__ import annotations

import json
import os

from brine.common.errors import BrineError, install_hint
from brine.common.process import run_bounded
from brine.vm.connection import Vlans

_COMMAND = "ovs-vsctl"
_TIMEOUT_S = 10
_OWNER = "brine-owner"


class OpenVswitchError(BrineError):
    """Open vSwitch refused, or can't be asked."""


def installed() -> bool:
    """Whether Open vSwitch's command is installed."""
    return any(os.access(f"{folder}/{_COMMAND}", os.X_OK) for folder in os.get_exec_path())


def bridges() -> list[str]:
    """The names of all bridges.

    :raises OpenVswitchError: if Open vSwitch can't be asked.
    """
    return _run("list-br").split()


def check_bridge(name: str) -> None:
    """Refuse a bridge that does not exist.

    :raises OpenVswitchError: if there is no such bridge, or no Open vSwitch.
    """
    if name not in bridges():
        text, hint = f"Open vSwitch has no bridge {name}", f"ovs-vsctl add-br {name}"
        raise OpenVswitchError(text, hint=hint)


def add_port(
    bridge: str, port: str, vlans: Vlans | None, owner: str, *, bridge_mtu: int | None = None
) -> None:
    """Make an interface a port of a bridge, in these VLANs; succeeds if it is one already.

    :param vlans: None is Open vSwitch's default: a port for frames of all VLANs.
    :param bridge_mtu: the MTU that the bridge keeps, in bytes. With None, it becomes that of a port
        with a smaller one, unless an admin has set it.
    :raises OpenVswitchError: if there is no such bridge, or Open vSwitch refuses.
    """
    # A port of another bridge moves; without this, Open vSwitch would refuse it.
    if _run("port-to-br", port, default=bridge).strip() != bridge:
        remove_port(port)
    columns = _columns(vlans)
    _run(
        *("--may-exist", "add-port", bridge, port),
        *("--", "clear", "Port", port, "tag", "trunks", "vlan_mode"),
        *(("--", "set", "Port", port, *columns) if columns else ()),
        # Quoted as the database's string, so that no character has a special meaning.
        *("--", "set", "Interface", port),
        f"external_ids:{_OWNER}={json.dumps(owner, ensure_ascii=False)}",
        *(("--", "set", "Interface", bridge, f"mtu_request={bridge_mtu}") if bridge_mtu else ()),
    )


def remove_port(port: str) -> None:
    """Remove a port from its bridge; succeeds if there is none."""
    _run("--if-exists", "del-port", port)


def our_ports() -> dict[str, str]:
    """All ports of Brine's, also those whose interface is gone, with the alias of that."""
    listed = _run("--format=json", "--columns=name,external_ids", "list", "Interface")
    found = {name: dict(pairs).get(_OWNER) for name, (_, pairs) in json.loads(listed)["data"]}
    return {name: owner for name, owner in found.items() if owner is not None}


def _columns(vlans: Vlans | None) -> list[str]:
    if vlans is None:
        return []
    trunks = ",".join(map(str, sorted(vlans.tagged)))
    if vlans.untagged is None:
        return ["vlan_mode=trunk", f"trunks={trunks}"]
    if not vlans.tagged:
        return ["vlan_mode=access", f"tag={vlans.untagged}"]
    return ["vlan_mode=native-untagged", f"tag={vlans.untagged}", f"trunks={trunks}"]


def _run(*arguments: str, default: str | None = None) -> str:
    """The output of Open vSwitch's command; *default* if it refuses."""
    command = [_COMMAND, f"--timeout={_TIMEOUT_S}", *arguments]
    limit_s = 2 * _TIMEOUT_S
    try:
        done = run_bounded(command, timeout_s=limit_s, environment=os.environ)
    except FileNotFoundError:
        hint = install_hint(apt="openvswitch-switch", dnf="openvswitch")
        text = f"Open vSwitch's command {_COMMAND} is not there"
        raise OpenVswitchError(text, hint=f"{hint}; or use another mode") from None
    except TimeoutError:
        text = f"Open vSwitch does not answer within {limit_s} s"
        hint = "see systemctl status openvswitch-switch"
        raise OpenVswitchError(text, hint=hint) from None
    if done.returncode == 0:
        return done.stdout
    if default is not None:
        return default
    lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
    text = f"Open vSwitch: {lines[-1].removeprefix('ovs-vsctl: ')}"
    hint = "see ovs-vsctl show, and systemctl status openvswitch-switch"
    raise OpenVswitchError(text, hint=hint)
