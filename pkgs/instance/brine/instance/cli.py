"""The command line of ``brine instance``."""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError

from brine.common.cli import Command, add_verb, seconds, whole_number

_SHOW = "brine.instance.show_commands"
_DEFINITION = "brine.instance.definition_commands"
_POWER = "brine.instance.power_commands"
_MOST_DRIVES = 99
_MOST_LINES = 999_999


def _pair(text: str) -> tuple[str, str]:
    before, _, after = text.partition("=")
    if not before or not after:
        raise ArgumentTypeError(f"no two values with = between them: {text!r}")
    return before, after


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, run: str, text: str, *, of_one: bool = True) -> argparse.ArgumentParser:
        added = add_verb(verbs, name, run, text)
        if of_one:
            added.add_argument("name", metavar="INSTANCE")
        return added

    listing = verb(
        "list", f"{_SHOW}:list_all", "list the instances, and what they do", of_one=False
    )
    listing.add_argument("--wide", action="store_true", help="with UP SINCE and NODE")
    info = verb("info", f"{_SHOW}:info", "show what is known of an instance")
    define = verb("define", f"{_DEFINITION}:define", "say what an instance should be", of_one=False)
    define.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="its spec, in JSON, or in YAML if it is called so; - is standard input, with either",
    )
    define.add_argument(
        "--from-config",
        action="store_const",
        dest="run",
        const="brine.instance.from_config:define_all",  # it loads what no other verb needs
        help="all instances of this node, from the cluster's configuration",
    )
    define.add_argument("--node", metavar="NODE", help="of which node, if not of this one")
    importing = verb(
        "import",
        f"{_DEFINITION}:import_machine",
        "define an instance that boots an image, or is what a libvirt domain is",
        of_one=False,
    )
    importing.add_argument("image", metavar="IMAGE", nargs="?", help="the image of its disk")
    importing.add_argument(
        "--libvirt",
        metavar="FILE",
        help="what virsh dumpxml --inactive has printed; - is standard input",
    )
    importing.add_argument("--name", metavar="NAME", help="of the instance")
    importing.add_argument(
        "--link", metavar="BRIDGE", help="of a NIC, or of NICs that libvirt has on no bridge"
    )
    importing.add_argument("--memory-mib", type=int, metavar="MIB", help="of the guest")
    importing.add_argument("--vcpus", type=int, metavar="N", help="of the guest")
    importing.add_argument("--accel", choices=("kvm", "tcg"), help="tcg emulates the processor")
    verb("undefine", f"{_DEFINITION}:undefine", "forget an instance that does not run")
    rename = verb(
        "rename", f"{_DEFINITION}:rename", "give an instance that does not run another name"
    )
    rename.add_argument("new_name", metavar="NAME")
    clone = verb(
        "clone",
        f"{_DEFINITION}:clone",
        "make an instance that is as another one, which does not run",
    )
    clone.add_argument("new_name", metavar="NAME")
    for option, metavar, text in (
        ("--disk", "PATH=OTHER", "where the clone has a disk; a block device is overwritten"),
        (
            "--address",
            "ADDRESS=OTHER",
            "which address the clone's NIC has in the place of another",
        ),
    ):
        clone.add_argument(
            option, type=_pair, action="append", default=[], metavar=metavar, help=text
        )
    start = verb("start", "brine.instance.start_command:start", "start an instance", of_one=False)
    start.add_argument("name", metavar="INSTANCE", nargs="?")
    start.add_argument("--all", action="store_true", help="all that should be up and are down")
    stop = verb("stop", f"{_POWER}:stop", "have an instance's guest shut down")
    reboot = verb(
        "reboot", f"{_POWER}:reboot", "have an instance's guest shut down, and start it anew"
    )
    for ending in (stop, reboot):
        ending.add_argument(
            "--timeout",
            type=seconds,
            metavar="SECONDS",
            help="how long the guest may take (default: what its spec says)",
        )
        ending.add_argument(
            "--force", action="store_true", help="end it if the guest does not shut down in time"
        )
    reboot.add_argument("--reset", action="store_true", help="press the reset button instead")
    verb("pause", f"{_POWER}:pause", "have an instance's processors stand still")
    verb("resume", f"{_POWER}:resume", "have a paused instance go on")
    verb("edit", f"{_DEFINITION}:edit", "change an instance's spec with your editor")
    cdrom = verb("cdrom", f"{_POWER}:cdrom", "change what is in a CD-ROM drive")
    cdrom.add_argument("medium", metavar="MEDIUM", nargs="?", help="an image, or a block device")
    cdrom.add_argument("--eject", action="store_true", help="leave the drive empty")
    cdrom.add_argument(
        "--drive",
        type=whole_number(0, _MOST_DRIVES),
        default=0,
        metavar="N",
        help="which one; default: 0, the first",
    )
    cdrom.add_argument(
        "--force", action="store_true", help="take away what the guest has locked, too"
    )
    cdrom.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help="how long the guest may take to give up what it has locked (default: 10)",
    )
    log = verb("log", f"{_SHOW}:log", "show what an instance has said on its serial line last")
    log.add_argument(
        "-n",
        "--lines",
        type=whole_number(1, _MOST_LINES),
        metavar="N",
        help="only the last N lines",
    )
    log.add_argument("--raw", action="store_true", help="with what controls a terminal")
    verb(
        "console",
        f"{_SHOW}:console",
        "attach to an instance's serial line; Ctrl-] leaves",
    )
    for each in (listing, info, define, importing, clone, cdrom, log):
        each.add_argument("--json", action="store_true", help="print JSON, for programs")
    for each in (define, clone, cdrom):
        each.add_argument("--dry-run", action="store_true", help="only say what would be done")
    importing.add_argument(
        "--dry-run", action="store_true", help="only print the spec, and define nothing"
    )


COMMAND = Command("run virtual machines under systemd", _configure)
