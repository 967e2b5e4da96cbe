"""The command line of ``brine instance``."""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from typing import Any

from brine.common.cli import Command, add_verb, seconds, whole_number
from brine.vm.arguments import instance_name
from brine.vm.values import MOST_MEMORY_MIB, MOST_VCPUS

_DEFINITION = "brine.instance.definition"
_OPERATIONS = "brine.instance.operations"


def _pair(text: str) -> tuple[str, str]:
    before, _, after = text.partition("=")
    if not before or not after:
        raise ArgumentTypeError(f"no two values with = between them: {text!r}")
    return before, after


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(
        name: str, run: str, text: str, *, of_one: bool = True, of: str | None = None
    ) -> argparse.ArgumentParser:
        added = add_verb(verbs, name, run, text)
        if of_one or of:
            added.add_argument("name", metavar="INSTANCE", type=instance_name, nargs=of)
        return added

    text = "list the instances with their states"
    listing = verb("list", "brine.instance.listing:list_all", text, of_one=False)
    listing.add_argument("--wide", action="store_true", help="also show UP SINCE and NODE")
    text = "show the processor time, memory, disk and network that instances use"
    usage = verb("top", "brine.instance.usage_commands:top", text, of_one=False)
    text = "the time between two measurements (default: 2)"
    usage.add_argument("--interval", metavar="SECONDS", type=seconds, default=2.0, help=text)
    info = verb("info", "brine.instance.report:info", "show what is known of instances", of="+")
    text = "define an instance from a spec, or several from a list of specs"
    define = verb("define", f"{_DEFINITION}:define", text, of_one=False)
    text = "the spec, or a list; JSON, or YAML if its name says so; - is standard input, in either"
    define.add_argument("file", metavar="FILE", nargs="?", help=text)
    define.add_argument(
        "--from-config",
        action="store_const",
        dest="run",
        const="brine.instance.from_config:define_all",  # it loads what no other verb needs
        help="define all instances of this node in the cluster's configuration",
    )
    define.add_argument("--node", metavar="NODE", help="the node, if not this one")
    text = "the configuration (default: the cluster's); - is standard input"
    define.add_argument("--config", metavar="FILE", help=text)
    text = "leave the instance of this name alone; may be repeated"
    define.add_argument("--but", metavar="NAME", action="append", default=[], help=text)
    text = "keep the admin_state of an instance that its user has shut down, and disks and NICs "
    text += "that were added by hand"
    define.add_argument("--keep-user-state", action="store_true", help=text)
    text = "define an instance from a disk image, or from a machine of libvirt's or Proxmox's"
    importing = verb("import", "brine.instance.importing:import_machine", text, of_one=False)
    importing.add_argument("image", metavar="IMAGE", nargs="?", help="the image of its disk")
    text = "the output of virsh dumpxml --inactive; - is standard input"
    importing.add_argument("--libvirt", metavar="FILE", help=text)
    text = "a machine of Proxmox: /etc/pve/qemu-server/NUMBER.conf; - is standard input"
    importing.add_argument("--proxmox", metavar="FILE", help=text)
    text = "the folder of a storage of Proxmox's, or of a pool of libvirt's"
    pairs: Any = {"type": _pair, "action": "append", "default": []}
    importing.add_argument("--storage", metavar="STORAGE=FOLDER", help=text, **pairs)
    importing.add_argument("--name", metavar="NAME", help="the name of the instance")
    text = "the bridge of its NIC, or of NICs on libvirt's networks"
    importing.add_argument("--link", metavar="BRIDGE", help=text)
    size, count = whole_number(1, MOST_MEMORY_MIB), whole_number(1, MOST_VCPUS)
    importing.add_argument("--memory-mib", type=size, metavar="MIB", help="the guest's memory")
    importing.add_argument("--vcpus", type=count, metavar="N", help="the guest's processors")
    importing.add_argument("--accel", choices=("kvm", "tcg"), help="tcg emulates the processor")
    text = "forget instances that do not run"
    undefine = verb("undefine", f"{_DEFINITION}:undefine", text, of="+")
    text = "delete the volumes of its disks that Brine has made or adopted, with all data"
    undefine.add_argument("--delete-volumes", action="store_true", help=text)
    undefine.add_argument("--yes", action="store_true", help="do not ask before that")
    rename = verb("rename", f"{_DEFINITION}:rename", "rename an instance that does not run")
    rename.add_argument("new_name", metavar="NAME")
    clone = verb("clone", "brine.instance.clone:clone", "copy an instance")
    clone.add_argument("new_name", metavar="NAME")
    text = "copy the disk PATH to OTHER; a block device is overwritten"
    clone.add_argument("--disk", metavar="PATH=OTHER", help=text, **pairs)
    text = "make the clone's volumes in this storage unit (default: in that of each original)"
    clone.add_argument("--unit", metavar="UNIT", default="", help=text)
    text = "use OTHER in the place of ADDRESS"
    clone.add_argument("--address", metavar="ADDRESS=OTHER", help=text, **pairs)
    start = verb("start", "brine.instance.start:start", "start instances", of="*")
    text = "start all instances that should be up and are down"
    start.add_argument("--all", action="store_true", help=text)
    text = "do not forget the watcher's tries, for programs that start it again and again"
    start.add_argument("--keep-tries", action="store_true", help=text)
    stop = verb("stop", f"{_OPERATIONS}:stop", "shut instances' guests down", of="*")
    text = "stop all instances that run, those with the highest start_order first"
    stop.add_argument("--all", action="store_true", help=text)
    text = "stop N at the same time (default: 50)"
    stop.add_argument("--parallel", metavar="N", type=whole_number(1, 1000), help=text)
    text = "shut instances' guests down, and start them with their present specs"
    reboot = verb("reboot", f"{_OPERATIONS}:reboot", text, of="+")
    for ending in (stop, reboot):
        text = "how long the guest may take (default: shutdown_timeout of its spec)"
        ending.add_argument("--timeout", type=seconds, metavar="SECONDS", help=text)
        text = "end it if the guest does not shut down in time"
        ending.add_argument("--force", action="store_true", help=text)
    reboot.add_argument("--reset", action="store_true", help="press the reset button instead")
    pause = verb("pause", f"{_OPERATIONS}:pause", "stop instances' processors", of="+")
    resume = verb("resume", f"{_OPERATIONS}:resume", "resume paused instances", of="+")
    edit = verb("edit", f"{_DEFINITION}:edit", "edit an instance's spec with your editor")
    text = "change keys of an instance's spec, and what runs of it where that is possible"
    setting = verb("set", f"{_DEFINITION}:set_keys", text)
    text = "such as memory_mib=4096; without VALUE, the default"
    setting.add_argument("assignments", metavar="KEY=VALUE", nargs="+", help=text)
    text = "also plug NICs and disks into a running instance, and take them out"
    for each in (define, edit):
        each.add_argument("--live", action="store_true", help=text)
    cdrom = verb("cdrom", "brine.instance.kvm.cdrom:cdrom", "change the medium in a CD-ROM drive")
    cdrom.add_argument("medium", metavar="MEDIUM", nargs="?", help="an image, or a block device")
    cdrom.add_argument("--eject", action="store_true", help="leave the drive empty")
    drive, text = whole_number(0, 99), "the drive, counted from 0 (default: 0)"
    cdrom.add_argument("--drive", type=drive, default=0, metavar="N", help=text)
    text = "also remove a medium that the guest has locked"
    cdrom.add_argument("--force", action="store_true", help=text)
    text = "how long the guest may take to release the drive (default: 10)"
    cdrom.add_argument("--timeout", type=seconds, metavar="SECONDS", help=text)
    text = "show the last output on an instance's serial line"
    log = verb("log", "brine.instance.serial_log:log", text)
    lines = whole_number(1, 999_999)
    log.add_argument("-n", "--lines", type=lines, metavar="N", help="only the last N lines")
    log.add_argument("--raw", action="store_true", help="the bytes as the guest sent them")
    text = "attach to an instance's serial line; Ctrl-] leaves"
    verb("console", "brine.instance.console:console", text)
    changing = [define, importing, undefine, rename, clone, start, stop, reboot, pause, resume]
    for each in (listing, usage, info, log, cdrom, setting, *changing):
        each.add_argument("--json", action="store_true", help="print JSON, for programs")
    for each in (define, clone, cdrom, setting):
        each.add_argument("--dry-run", action="store_true", help="only say what would be done")
    text = "only print the spec, and define nothing"
    importing.add_argument("--dry-run", action="store_true", help=text)


COMMAND = Command("run virtual machines under systemd", _configure)
