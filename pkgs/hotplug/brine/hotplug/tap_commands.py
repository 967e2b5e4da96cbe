"""The verbs of ``brine tap``: make taps that any QEMU can use, remove them, clean up after VMs."""

from __future__ import annotations

import argparse
import grp
import json
import pwd
from collections.abc import Callable
from dataclasses import asdict

from brine.common.errors import UsageError, printable
from brine.common.journal import log_command
from brine.common.privileges import Capability, keep_only, may
from brine.common.tables import print_table
from brine.hotplug.net.gc import find_leftovers, remove_leftovers
from brine.hotplug.net.netlink import Netlink
from brine.hotplug.net.records import Entry, list_taps
from brine.hotplug.net.wiring import bring_up, restore_filters, take_down
from brine.hotplug.options import nic_from
from brine.hotplug.session import settle_all
from brine.vm.vif import connection, tap_name

# The kernel's calls take no larger one for a tap's.
_LARGEST_ID = 2**31 - 1
_HEADING = ("NAME", "INSTANCE", "NIC", "STATE", "WIRING", "IP", "MTU")
_WIDE = ("FILTER", "DROPS")


def make_tap(arguments: argparse.Namespace) -> int:
    """``brine tap up``."""
    _prepare()
    nic = nic_from(arguments, *_owner(arguments))
    name = arguments.name or nic.tap_name()
    user = _id_of("user", arguments.user, lambda name: pwd.getpwnam(name).pw_uid)
    group = _id_of("group", arguments.group, lambda name: grp.getgrnam(name).gr_gid)
    if arguments.dry_run:
        print(f"would be up: {name}, {nic.described()}")
        return 0
    wired = bring_up(nic, name=name, queues=arguments.queues, user=user, group=group)
    word = "up" if wired.changed else "unchanged"
    print(f"{word}: {name}, {nic.described()}, MTU {wired.mtu}")
    return 0


def remove_tap(arguments: argparse.Namespace) -> int:
    """``brine tap down``."""
    _prepare()
    name = arguments.name or tap_name(*_owner(arguments))
    if arguments.dry_run:
        print(f"would be down: {name}")
        return 0
    changed = take_down(name, force=arguments.force)
    print(f"down: {name}" if changed else f"unchanged: {name} is not there")
    return 0


def print_taps(arguments: argparse.Namespace) -> int:
    """``brine tap list``."""
    _prepare()
    entries = list_taps()
    if arguments.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
    else:
        heading = (*_HEADING, *_WIDE) if arguments.wide else _HEADING
        print_table(heading, (_row(one)[: len(heading)] for one in entries), none="no taps")
    return 0


def restore_taps_filters(arguments: argparse.Namespace) -> int:
    """``brine tap filter``."""
    _prepare()
    with Netlink() as netlink:
        restored = restore_filters(netlink)
    for name in restored:
        print(f"restored: the filter of {name}")
    if not restored:
        print("unchanged: no filter is missing")
    return 0


def collect_garbage(arguments: argparse.Namespace) -> int:
    """``brine tap gc``."""
    _prepare(Capability.SETGID, Capability.SETUID)  # what talks to QEMUs gives up all
    if not may(Capability.NET_ADMIN):
        raise UsageError("this user can't see leftovers", hint="be root")
    dry = arguments.dry_run
    look = find_leftovers if dry else remove_leftovers
    found = look(at_once=arguments.all, idle_for_s=arguments.idle_for)
    if not dry:
        settle_all()
    if arguments.json:
        leftovers = [asdict(one) for one in found]
        print(json.dumps({"dry_run": dry, "leftovers": leftovers}, indent=2))
        return 0
    for one in found:
        whose = f"NIC {printable(one.nic)} of {printable(one.instance)}"
        print(
            f"{'would remove' if dry else 'removed'}: {one.kind} {one.name}, {whose}: {one.reason}"
        )
    if not found:
        print("nothing is left over")
    return 0


def _prepare(*more: Capability) -> None:
    log_command("brine")
    # A process of any user may have a tap open, and so may be a script that takes too long.
    kept = (Capability.DAC_OVERRIDE, Capability.KILL, Capability.NET_ADMIN, Capability.SYS_PTRACE)
    keep_only(*kept, *more)


def _owner(arguments: argparse.Namespace) -> tuple[str, str]:
    if arguments.instance is None:
        if arguments.name is None:
            hint = "brine tap up NAME ..., or brine tap up --instance INSTANCE --nic NIC ..."
            raise UsageError("no tap is named", hint=hint)
        return arguments.name, arguments.nic
    return arguments.instance, arguments.nic


def _id_of(kind: str, name: str | None, find: Callable[[str], int]) -> int | None:
    if name is None:
        return None
    if name.isdecimal() and int(name) <= _LARGEST_ID:
        return int(name)
    try:
        return find(name)
    except KeyError:
        raise UsageError(f"there is no {kind} {name}") from None


def _row(entry: Entry) -> tuple[str, ...]:
    state = entry.state.value
    if entry.holders:
        state += f" by {', '.join(str(holder.process) for holder in entry.holders)}"
    return (
        entry.name,
        printable(entry.instance),
        printable(entry.nic),
        state,
        connection(entry.mode, entry.link or "", entry.vlan or "") if entry.mode else "-",
        " ".join(entry.ips) or "-",
        str(entry.mtu or "-"),
        entry.filter.value if entry.filter else "-",
        "-" if entry.drops is None else str(entry.drops),
    )
