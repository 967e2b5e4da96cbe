"""``brine tap``: make taps that any QEMU can use, remove them, and clean up after dead VMs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from brine.common.cli import Command, table, whole_number
from brine.common.errors import UsageError, printable
from brine.common.privileges import Capability, keep_only, may
from brine.hotplug.cli_nic import add_told, add_wiring, connection, described, wiring_of
from brine.hotplug.messages import log_to_journal

if TYPE_CHECKING:
    from brine.hotplug.net.records import Entry
    from brine.hotplug.nic import Wiring


# The kernel's calls take no larger one for a tap's.
_LARGEST_ID = 2**31 - 1
_HEADING = ("NAME", "INSTANCE", "NIC", "STATE", "WIRING", "IP", "MTU")

# Netlink takes long to import: what needs it is imported where it is used.


def _up(arguments: argparse.Namespace) -> int:
    from brine.hotplug.net.wiring import bring_up

    _prepare()
    wiring = _wiring(arguments)
    wiring.check()
    name = arguments.name or wiring.tap_name()
    user, group = _user(arguments.user), _group(arguments.group)
    if arguments.dry_run:
        print(f"would be up: {name}, {described(wiring)}")
        return 0
    wired = bring_up(wiring, name=name, queues=arguments.queues, user=user, group=group)
    word = "up" if wired.changed else "unchanged"
    print(f"{word}: {name}, {described(wiring)}, MTU {wired.mtu}")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    from brine.hotplug.net.wiring import take_down

    _prepare()
    name = _name(arguments)
    if arguments.dry_run:
        print(f"would be down: {name}")
        return 0
    changed = take_down(name, force=arguments.force)
    print(f"down: {name}" if changed else f"unchanged: {name} is not there")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from brine.hotplug.net.records import list_taps

    _prepare()
    entries = list_taps()
    if arguments.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
        return 0
    if not entries:
        print("no taps")
        return 0
    print(*table([_HEADING, *map(_row, entries)]), sep="\n")
    return 0


def _gc(arguments: argparse.Namespace) -> int:
    from brine.hotplug.net.gc import find_leftovers, remove_leftovers
    from brine.hotplug.session import settle_all

    _prepare(Capability.SETGID, Capability.SETUID)  # what talks to QEMUs gives up all
    if not may(Capability.NET_ADMIN):
        raise UsageError("what is left over can't be seen as this user", hint="be root")
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
    log_to_journal()
    # Who has a tap open can be anybody, and so can a script be that takes too long.
    kept = (Capability.DAC_OVERRIDE, Capability.KILL, Capability.NET_ADMIN, Capability.SYS_PTRACE)
    keep_only(*kept, *more)


def _wiring(arguments: argparse.Namespace) -> Wiring:
    return wiring_of(arguments, *_owner(arguments))


def _owner(arguments: argparse.Namespace) -> tuple[str, str]:
    if arguments.instance is None:
        if arguments.name is None:
            hint = "brine tap up NAME ..., or brine tap up --instance INSTANCE --nic NIC ..."
            raise UsageError("whose tap is not said", hint=hint)
        return arguments.name, arguments.nic
    return arguments.instance, arguments.nic


def _name(arguments: argparse.Namespace) -> str:
    from brine.hotplug.net.tap import tap_name

    if arguments.name:
        return str(arguments.name)
    return tap_name(*_owner(arguments))


def _user(name: str | None) -> int | None:
    import pwd

    if name is None:
        return None
    if name.isdecimal() and int(name) <= _LARGEST_ID:
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise UsageError(f"there is no user {name}") from None


def _group(name: str | None) -> int | None:
    import grp

    if name is None:
        return None
    if name.isdecimal() and int(name) <= _LARGEST_ID:
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise UsageError(f"there is no group {name}") from None


def _row(entry: Entry) -> tuple[str, ...]:
    state = entry.state.value
    if entry.holders:
        state += f" by {', '.join(str(holder.process) for holder in entry.holders)}"
    wiring = "-"
    if entry.mode == "routed":
        wiring = f"routed by table {entry.link or 'main'}"
    elif entry.mode:
        wiring = connection(entry.mode, entry.link or "", entry.vlan or "", ())
    return (
        entry.name,
        printable(entry.instance),
        printable(entry.nic),
        state,
        wiring,
        " ".join(entry.ips) or "-",
        str(entry.mtu or "-"),
    )


# The command line.


def _add_whose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="the tap; default: made from INSTANCE and NIC"
    )
    parser.add_argument("--instance", help="whose NIC it is; default: NAME")
    parser.add_argument("--nic", default="0", help="the NIC's UUID, or its index; default: 0")


def _configure_up(up: argparse.ArgumentParser) -> None:
    _add_whose(up)
    add_wiring(up)
    tap = up.add_argument_group("the tap")
    tap.add_argument(
        "--queues", type=whole_number(1, 256), default=1, metavar="N", help="default: 1"
    )
    tap.add_argument("--user", help="who may open it, beside root")
    tap.add_argument("--group", help="which group may open it")
    add_told(up)
    up.add_argument("--dry-run", action="store_true", help="only check, and say the name")
    up.set_defaults(run=_up)


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _configure_up(
        verbs.add_parser(
            "up",
            help="make a tap that stays, and wire it",
            description="Makes a tap that stays, wires it, and puts it up, for any QEMU: "
            "-netdev tap,ifname=NAME,script=no,downscript=no.",
            allow_abbrev=False,
        )
    )
    down = verbs.add_parser(
        "down",
        help="disconnect and remove a tap",
        description="Disconnects a tap of ours, and removes it.",
        allow_abbrev=False,
    )
    _add_whose(down)
    down.add_argument("--force", action="store_true", help="also if a VM has it open")
    down.add_argument("--dry-run", action="store_true", help="only say the name")
    down.set_defaults(run=_down)
    list_ = verbs.add_parser(
        "list",
        help="list the taps of this node",
        description="Lists the taps that are ours, and whose they are.",
        allow_abbrev=False,
    )
    list_.add_argument("--json", action="store_true", help="print a JSON list")
    list_.set_defaults(run=_list)
    gc = verbs.add_parser(
        "gc",
        help="remove what dead VMs have left",
        description="Removes taps, routes, rules and ports of VMs that ended.",
        allow_abbrev=False,
    )
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    which = gc.add_mutually_exclusive_group()
    which.add_argument(
        "--all",
        action="store_true",
        help="also taps made within the last minute, or whose instance has a QMP socket",
    )
    which.add_argument(
        "--idle-for",
        type=whole_number(0, 10**8),
        metavar="SECONDS",
        help="leave taps that were not idle for so long, as far as gc has looked; for timers",
    )
    gc.add_argument("--json", action="store_true", help="print a JSON object")
    gc.set_defaults(run=_gc)


COMMAND = Command("make, list and remove tap interfaces", _configure)
