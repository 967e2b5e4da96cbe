"""
Bridges for virtual machines, made by systemd-networkd
======================================================

::

    br0:
      brine_network.bridge:
        - uplink: eth0
        - dhcp: true

The state ``brine.network`` makes those of pillar, ``brine:network:bridges``. systemd-networkd must
be what looks after the node's network already.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    __opts__: dict[str, Any] = {}
    __salt__: dict[str, Callable[..., Any]] = {}

Result = dict[str, Any]

FOLDER = "/etc/systemd/network"
TIMEOUT_S = 60.0
"""How long a bridge may take to get its addresses."""

_PAUSE_S = 0.5
_HEAD = "# Made by Salt's state brine_network.bridge.\n"
_PREFIX = "00-brine-"  # networkd takes the first file that has an interface
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}"
_ENABLED = ("enabled", "enabled-runtime", "static", "indirect", "alias")
_BY_NETWORKD = ("dhcp", "ra")


def bridge(
    name: str,
    uplink: str = "",
    addresses: Sequence[str] = (),
    gateways: Sequence[str] = (),
    dns: Sequence[str] = (),
    dhcp: bool = False,
    vlan_filtering: bool = False,
) -> Result:
    """
    Ensure a bridge is there, now and after each boot, by files of systemd-networkd.

    With an uplink, guests on the bridge are in the network of that interface. The node's addresses
    there become those of the bridge: the state fails, and changes nothing, if the uplink or the
    bridge has an address or a gateway that the bridge would not have. If the bridge does not get
    its addresses within a minute, all is put back as it was, and the state fails.

    Example::

        br0:
          brine_network.bridge:
            - uplink: eth0
            - addresses: [192.0.2.10/24]
            - gateways: [192.0.2.1]

    :param name: of the bridge.
    :param uplink: the interface that becomes its port; empty is none.
    :param addresses: the node's on the bridge, each with the length of its prefix.
    :param gateways: of the default routes.
    :param dns: addresses of DNS servers.
    :param dhcp: whether the node gets addresses there by DHCP.
    :param vlan_filtering: whether the bridge filters VLANs, which NICs with the key vlan need.
    """
    wanted = {"addresses": addresses, "gateways": gateways, "dns": dns}
    if fault := _fault_of(name, uplink, wanted):
        return _result(name, False, {}, fault)
    links = {one["ifname"]: one for one in _ip("address", "show")}
    if fault := _fault_of_node(name, uplink, links):
        return _result(name, False, {}, fault)
    mac = links[uplink]["address"] if uplink else ""
    files = _files(name, uplink, wanted, dhcp=dhcp, vlan_filtering=vlan_filtering, mac=mac)
    before = {file: _read(file) for file in files}
    changes: Result = {
        file: {"old": before[file] and "other", "new": "made"}
        for file, text in files.items()
        if before[file] != text
    }
    for link, master in ((name, None), (uplink, name)):
        if link and not (link in links and links[link].get("master") == master):
            changes[link] = {"old": None, "new": f"port of {master}" if master else "bridge"}
    if not changes:
        return _result(name, True, {}, "is as it should be")
    static = [*map(ipaddress.ip_interface, addresses)]
    for link in filter(links.get, (name, uplink)):
        if lost := _lost(links[link], static, gateways, dhcp=dhcp):
            text = f"{link} has {', '.join(lost)}, which the bridge would not have"
            return _result(name, False, {}, f"{text}: declare it, or take it away first")
    if __opts__["test"]:
        return _result(name, None, changes, "would be made")
    for file, text in files.items():
        _write(file, text)
    fault = _reload() or _await_bridge(name, uplink, static, dhcp=dhcp)
    if not fault:
        return _result(name, True, changes, "made")
    for file, old in before.items():
        _write(file, old)
    if name not in links:
        _run("ip", "link", "delete", name)
    again = _reload() or (_run("networkctl", "reconfigure", uplink)[1] if uplink else "")
    text = "the former configuration is "
    text += f"not restored: {again}" if again else "restored"
    return _result(name, False, {}, f"{fault}; {text}")


def _result(name: str, result: bool | None, changes: Result, comment: str) -> Result:
    text = f"{name}: {comment}" if result is False else f"{name} {comment}"
    return {"name": name, "result": result, "changes": changes, "comment": text}


# What is wanted.


def _fault_of(name: str, uplink: str, wanted: dict[str, Sequence[str]]) -> str:
    """What is wrong with the arguments; empty if nothing is."""
    for link in filter(None, (name, uplink)):
        if not isinstance(link, str) or not re.fullmatch(_NAME, link):
            return f"{link!r} is no name of an interface"
    if uplink == name:
        return "a bridge can't be its own uplink"
    for key, given in wanted.items():
        if isinstance(given, str):
            return f"{key} must be a list"
        for one in given:
            try:
                if key == "addresses" and "/" not in str(one):
                    raise ValueError
                (ipaddress.ip_interface if key == "addresses" else ipaddress.ip_address)(str(one))
            except ValueError:
                example = "192.0.2.10/24" if key == "addresses" else "192.0.2.1"
                return f"{key}: {one!r} is not such as {example}"
    return ""


def _files(
    name: str,
    uplink: str,
    wanted: dict[str, Sequence[str]],
    *,
    dhcp: bool,
    vlan_filtering: bool,
    mac: str,
) -> dict[str, str]:
    """The files, in the order in which they are written: the uplink changes last."""
    base = f"{FOLDER}/{_PREFIX}{name}"
    # With the uplink's MAC address, the node gets the same lease as before.
    device = [f"[NetDev]\nName={name}\nKind=bridge\n", f"MACAddress={mac}\n" if uplink else ""]
    device += ["\n[Bridge]\nVLANFiltering=yes\n"] if vlan_filtering else []
    network = [f"[Match]\nName={name}\n\n[Network]\nDHCP={'yes' if dhcp else 'no'}\n"]
    if not uplink:
        network.append("ConfigureWithoutCarrier=yes\n")
    for key, option in (("addresses", "Address"), ("gateways", "Gateway"), ("dns", "DNS")):
        network += [f"{option}={one}\n" for one in wanted[key]]
    files = {f"{base}.netdev": "".join(device), f"{base}.network": "".join(network)}
    if uplink:
        port = f"[Match]\nName={uplink}\n\n[Network]\nBridge={name}\n"
        files[f"{base}-uplink.network"] = port
    return {file: _HEAD + text for file, text in files.items()}


# What is there.


def _fault_of_node(name: str, uplink: str, links: dict[str, Any]) -> str:
    """Why this node can't have the bridge; empty if it can."""
    for question, good in (("is-active", ("active",)), ("is-enabled", _ENABLED)):
        said = _run("systemctl", question, "systemd-networkd.service")[0].strip()
        if said not in good:
            text = f"systemd-networkd is {said or 'not there'}"
            return f"{text}: brine-tap(1), BRIDGES, has what other managers of networks need"
    if not uplink:
        return ""
    if uplink not in links:
        return f"there is no interface {uplink}"
    if (master := links[uplink].get("master")) not in (None, name):
        return f"{uplink} is a port of {master}"
    above = [one for one, link in links.items() if link.get("link") == uplink]
    # Each end of a pair of virtual interfaces names the other one.
    above = [one for one in above if links[uplink].get("link") != one]
    if above:
        return f"{', '.join(above)} needs {uplink}, and would be lost with the next boot"
    said, fault = _run("networkctl", "--json=short", "status", uplink)
    if fault:
        return fault
    try:
        state = json.loads(said)
    except ValueError:
        return f"networkctl's answer can't be used: {said[:60]!r}"
    scopes = [one.get("scope") for one in links[uplink].get("addr_info", ())]
    if state.get("AdministrativeState") == "unmanaged" and "global" in scopes:
        return f"{uplink} has its addresses from another manager of networks than systemd-networkd"
    file = os.path.basename(state.get("NetworkFile") or "")
    if file and not file.startswith(_PREFIX) and file < _PREFIX:
        return f"{file} has {uplink}, and comes before {_PREFIX}: rename or remove it"
    return ""


def _lost(link: Result, static: Sequence[Any], gateways: Sequence[str], *, dhcp: bool) -> list[str]:
    """Addresses and gateways of an interface that the bridge would not have."""
    lost = []
    for one in link.get("addr_info", ()):
        if one["scope"] != "global":
            continue
        here = ipaddress.ip_interface(f"{one['local']}/{one['prefixlen']}")
        # IPv6 addresses that a router gives come by themselves.
        comes = one.get("dynamic") and (dhcp or here.version == 6)
        if not comes and here not in static:
            lost.append(str(here))
    wanted = {ipaddress.ip_address(one) for one in gateways}
    for family in ("-4", "-6"):
        for route in _ip(family, "route", "show", "default", "dev", link["ifname"]):
            gateway, by = route.get("gateway"), route.get("protocol")
            comes = by == "ra" or (by in _BY_NETWORKD and dhcp)
            if gateway and not comes and ipaddress.ip_address(gateway) not in wanted:
                lost.append(f"the gateway {gateway}")
        for route in _ip(family, "route", "show", "dev", link["ifname"]):
            if route["dst"] != "default" and route.get("protocol") in ("static", "boot", None):
                lost.append(f"a route to {route['dst']}")
    return lost


def _await_bridge(name: str, uplink: str, static: Sequence[Any], *, dhcp: bool) -> str:
    """Wait for the bridge; what is missing then, or nothing."""
    end = time.monotonic() + TIMEOUT_S
    while True:
        links = {one["ifname"]: one for one in _ip("address", "show")}
        there = links.get(name, {}).get("addr_info", ())
        have = {ipaddress.ip_interface(f"{one['local']}/{one['prefixlen']}") for one in there}
        missing = [str(one) for one in static if one not in have]
        if name not in links:
            missing.append("the bridge itself")
        elif uplink and links.get(uplink, {}).get("master") != name:
            missing.append(f"its port {uplink}")
        elif dhcp and not any(one.get("dynamic") and one["scope"] == "global" for one in there):
            missing.append("an address by DHCP")
        if not missing:
            return ""
        if time.monotonic() > end:
            return f"after {TIMEOUT_S:g} s there is not: {', '.join(missing)}"
        time.sleep(_PAUSE_S)


def _ip(*arguments: str) -> list[Result]:
    said, _ = _run("ip", "-json", *arguments)
    found = json.loads(said or "[]")
    return [one for one in found if one]


def _reload() -> str:
    """Have networkd read its files; what failed."""
    return _run("networkctl", "reload")[1]


def _run(*command: str) -> tuple[str, str]:
    """What a command says, and what failed."""
    done = __salt__["cmd.run_all"]([*command], python_shell=False, ignore_retcode=True)
    fault = ""
    if done["retcode"]:
        fault = done["stderr"].strip() or f"{' '.join(command)} failed with {done['retcode']}"
    return done["stdout"], fault


def _read(file: str) -> str | None:
    try:
        with open(file, encoding="utf-8") as there:
            return there.read()
    except FileNotFoundError:
        return None


def _write(file: str, text: str | None) -> None:
    """Write a file whole, or remove it."""
    if text is None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)
        return
    os.makedirs(FOLDER, exist_ok=True)
    unfinished = f"{file}.unfinished"
    with open(unfinished, "w", encoding="utf-8") as there:
        there.write(text)
        there.flush()
        os.fsync(there.fileno())
    os.replace(unfinished, file)
