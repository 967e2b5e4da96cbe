"""The verbs of ``brine instance`` for a running instance: stop, reboot, pause, resume, cdrom."""

from __future__ import annotations

import argparse
import json
import os

from brine.common.cli import undo_when_told_to_end
from brine.common.errors import UsageError, printable
from brine.instance import operations
from brine.instance.kvm.cdrom import EJECT_TIMEOUT_S, change_medium
from brine.instance.messages import log_to_journal
from brine.instance.operations import Stopped
from brine.instance.start import interrupted


def stop(arguments: argparse.Namespace) -> int:
    """``brine instance stop``"""
    undo_when_told_to_end()
    log_to_journal("brine")
    name = arguments.name
    try:
        done = operations.stop_instance(name, force=arguments.force, timeout_s=arguments.timeout)
    except KeyboardInterrupt:
        return interrupted(name, runs="runs on, and may still do what it was asked")
    words = {
        Stopped.STOPPED: f"stopped: {name}",
        Stopped.NOTED: f"noted: {name} is down already, and should be from now on",
        Stopped.CLEANED_UP: f"cleaned up: {name} was down already, and what was left of it is gone",
        Stopped.UNCHANGED: f"unchanged: {name} does not run",
    }
    print(words[done])
    return 0


def reboot(arguments: argparse.Namespace) -> int:
    """``brine instance reboot``"""
    undo_when_told_to_end()
    log_to_journal("brine")
    name = arguments.name
    if arguments.reset and (arguments.force or arguments.timeout is not None):
        hint = "leave out --force and --timeout, or --reset"
        raise UsageError("--reset asks nobody, and waits for nobody", hint=hint)
    try:
        if arguments.reset:
            operations.reset_instance(name)
        else:
            operations.reboot_instance(name, force=arguments.force, timeout_s=arguments.timeout)
    except KeyboardInterrupt:
        return interrupted(name, runs="runs, and may still reboot")
    print(f"{'reset' if arguments.reset else 'rebooted'}: {name}")
    return 0


def pause(arguments: argparse.Namespace) -> int:
    """``brine instance pause``"""
    log_to_journal("brine")
    changed = operations.pause_instance(arguments.name)
    print(f"paused: {arguments.name}" if changed else f"unchanged: {arguments.name} is paused")
    return 0


def resume(arguments: argparse.Namespace) -> int:
    """``brine instance resume``"""
    log_to_journal("brine")
    changed = operations.resume_instance(arguments.name)
    print(f"resumed: {arguments.name}" if changed else f"unchanged: {arguments.name} is not paused")
    return 0


def cdrom(arguments: argparse.Namespace) -> int:
    """``brine instance cdrom``"""
    if (arguments.medium is None) != arguments.eject:
        raise UsageError("what is to be in the drive?", hint="name a medium, or give --eject")
    undo_when_told_to_end()
    log_to_journal("brine")
    name, number, dry_run = arguments.name, arguments.drive, arguments.dry_run
    path = "" if arguments.eject else os.path.abspath(arguments.medium)
    changed = change_medium(
        name,
        path,
        number=number,
        force=arguments.force,
        timeout_s=arguments.timeout or EJECT_TIMEOUT_S,
        dry_run=dry_run,
    )
    if arguments.json:
        result = {"name": name, "drive": number, "medium": path or None}
        print(json.dumps({**result, "changed": changed, "dry_run": dry_run}, indent=2))
        return 0
    what = f"drive {number} of {name} " + (f"has {printable(path)}" if path else "is empty")
    done = f"{'would be ' if dry_run else ''}changed" if changed else "unchanged"
    print(f"{done}: {what}")
    return 0
