"""``brine config``: the configuration, shown, changed, checked and undone."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brine.common import paths
from brine.common.cli import Command
from brine.common.errors import UsageError

if TYPE_CHECKING:
    from brine.config.model import Configuration
    from brine.config.store import ConfigStore


# The options of commands that work on the configuration: which one, and how long to wait.


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """Give a command the options that :func:`store_of` reads."""
    parser.add_argument(
        "--config",
        type=Path,
        default=paths.CONFIG_FILE,
        metavar="FILE",
        help="the configuration, if not %(default)s",
    )
    parser.add_argument(
        "--lock-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long to wait for another writer (default: 10)",
    )


def store_of(arguments: argparse.Namespace) -> ConfigStore:
    """The store of the configuration that the command line says.

    :raises UsageError: if the time to wait is none.
    :raises brine.config.model.ConfigError: see :class:`ConfigStore`.
    """
    from brine.config.store import ConfigStore  # takes long to import

    if not 0 <= arguments.lock_timeout < 1e6:
        raise UsageError("--lock-timeout must be a number of seconds, 0 or more")
    return ConfigStore(Path(arguments.config).absolute())


# What takes time to import is imported where it is needed: `brine --help` loads this module.


def _configure(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    apply = commands.add_parser("apply", help="merge what is declared into the configuration")
    apply.add_argument("file", metavar="FILE", help="JSON, as in brine-config.data(5); - for stdin")
    apply.add_argument("--dry-run", action="store_true", help="only say what would change")
    apply.add_argument(
        "--prune", action="store_true", help="remove objects that a section of FILE does not name"
    )
    apply.add_argument("--json", action="store_true", help="for programs")
    apply.set_defaults(run=_apply)

    show = commands.add_parser("show", help="print the configuration, or a part, as JSON")
    show.add_argument(
        "pointer",
        nargs="?",
        default="",
        metavar="POINTER",
        help="JSON pointer, with names in place of UUIDs: /instances/web1/nics/0/ip",
    )
    show.add_argument("--json", action="store_true", help="there is no other format")
    show.set_defaults(run=_show)

    verify = commands.add_parser("verify", help="look for faults; status 1 if there are any")
    verify.add_argument("file", nargs="?", type=Path, metavar="FILE", help="another configuration")
    verify.add_argument("--json", action="store_true", help="for programs")
    verify.set_defaults(run=_verify)

    diff = commands.add_parser("diff", help="what differs between two versions")
    diff.add_argument("old", nargs="?", metavar="OLD", help="serial of a kept version, or a file")
    diff.add_argument("new", nargs="?", metavar="NEW", help="the same; default: the current one")
    diff.add_argument("--json", action="store_true", help="for programs")
    diff.set_defaults(run=_diff)

    versions = commands.add_parser("versions", help="list the kept versions")
    versions.add_argument("--json", action="store_true", help="for programs")
    versions.set_defaults(run=_versions)

    restore = commands.add_parser("restore", help="go back to the content of a kept version")
    restore.add_argument("serial", type=int, metavar="SERIAL", help="see brine config versions")
    restore.add_argument("--dry-run", action="store_true", help="only say what would change")
    restore.add_argument("--json", action="store_true", help="for programs")
    restore.set_defaults(run=_restore)

    export = commands.add_parser("export-ssconf", help="write what every node should know")
    export.add_argument("folder", type=Path, metavar="DIR", help=f"such as {paths.SSCONF_DIR}")
    export.add_argument("--dry-run", action="store_true", help="only say what would change")
    export.add_argument("--json", action="store_true", help="for programs")
    export.set_defaults(run=_export)

    extra = commands.add_parser("extra-files", help="list the files that every node needs besides")
    extra.add_argument("--json", action="store_true", help="for programs: with who uses each")
    extra.set_defaults(run=_extra_files)


def _apply(arguments: argparse.Namespace) -> int:
    from brine.config.apply import apply
    from brine.config.outcome import outcome_of
    from brine.config.store import Replaced

    store = store_of(arguments)
    declared = _read_input(arguments.file)
    with store.writing(arguments.lock_timeout, dry_run=arguments.dry_run) as writer:
        old, overtaken_by = writer.current, writer.standing.overtaken_by
        if old is None:
            store.expect_none_lost()
        applied = apply(old, declared, prune=arguments.prune)
        new = writer.write(applied.new)
    done = Replaced(store.path, old, new, writer.aside, overtaken_by)
    outcome = outcome_of(done, applied.notes, dry_run=arguments.dry_run)
    if arguments.json:
        outcome.print_json()
    else:
        outcome.print_applied()
    return 0


def _read_input(name: str) -> Any:
    from brine.config.schema import ConfigError, parse_json

    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: can't be read: {error.strerror}") from error
    try:
        return parse_json(data, unique_keys=True)
    except ConfigError as error:
        hint = error.hint or (
            "FILE is JSON, as in brine-config.data(5); "
            "what Salt's pillar declares is applied by the state brine.config"
        )
        raise ConfigError(f"{name}: {error}", hint=hint) from error


def _show(arguments: argparse.Namespace) -> int:
    from brine.config.model import resolve

    configuration = store_of(arguments).read()
    print(json.dumps(resolve(configuration, arguments.pointer), indent=2, ensure_ascii=False))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from brine.config.outcome import counted, overtaken
    from brine.config.params import Mistake
    from brine.config.schema import parse_json
    from brine.config.store import ConfigStore
    from brine.config.verify import find, find_misplaced

    store = ConfigStore(arguments.file.absolute()) if arguments.file else store_of(arguments)
    configuration = store.read()
    found = find(configuration) + find_misplaced(parse_json(store.read_bytes()))
    if (by := store.overtaken_by(configuration)) is not None:
        text = f"{configuration.serial_no} {overtaken(configuration.serial_no, by)}"
        found.append(Mistake("/serial_no", text, "older"))
    if arguments.json:
        lines = [{"pointer": f.where, "kind": f.kind, "text": f.text} for f in found]
        print(json.dumps(lines, indent=2))
    else:
        for fault in found:
            print(fault)
        print(counted(len(found), "fault") if found else "no faults")
    return 1 if found else 0


def _diff(arguments: argparse.Namespace) -> int:
    from brine.config.diff import changes
    from brine.config.outcome import counted
    from brine.config.schema import ConfigError

    store = store_of(arguments)
    if arguments.old is None:
        kept = store.versions()
        if not kept:
            raise ConfigError("no earlier version is kept, so there is nothing to compare with")
        old = store.read_version(kept[0].serial_no)
    else:
        old = _version(store, arguments.old)
    new = store.read() if arguments.new is None else _version(store, arguments.new)
    found = changes(old, new)
    if arguments.json:
        result = {
            "old_serial": old.serial_no,
            "new_serial": new.serial_no,
            "changes": [change.to_json() for change in found],
        }
        print(json.dumps(result, indent=2))
    else:
        for change in found:
            print(change)
        count = counted(len(found), "change") if found else "no changes"
        print(f"serial {old.serial_no} -> {new.serial_no}: {count}")
    return 0


def _version(store: ConfigStore, name: str) -> Configuration:
    """A kept version by serial, the current one by its serial, or a file."""
    from brine.config.store import ConfigStore

    if not name.isdecimal():
        return ConfigStore(Path(name).absolute()).read()
    current = store.read()
    return current if current.serial_no == int(name) else store.read_version(int(name))


def _versions(arguments: argparse.Namespace) -> int:
    from datetime import UTC, datetime

    kept = store_of(arguments).versions()
    times = [datetime.fromtimestamp(version.written, UTC) for version in kept]
    if arguments.json:
        lines = [
            {
                "serial": version.serial_no,
                "written": time.isoformat(timespec="seconds"),
                "bytes": version.size,
                "file": str(version.file),
            }
            for version, time in zip(kept, times, strict=True)
        ]
        print(json.dumps(lines, indent=2))
        return 0
    for version, time in zip(kept, times, strict=True):
        local = time.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        print(f"{version.serial_no:>8}  {local}  {version.size:>10} bytes")
    if not kept:
        print("no version is kept")
    return 0


def _restore(arguments: argparse.Namespace) -> int:
    from brine.config.outcome import outcome_of

    store = store_of(arguments)
    done = store.restore(arguments.serial, arguments.lock_timeout, dry_run=arguments.dry_run)
    outcome = outcome_of(done, dry_run=arguments.dry_run)
    if arguments.json:
        outcome.print_json()
    else:
        outcome.print_restored(arguments.serial)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from brine.config import ssconf

    values = ssconf.export(store_of(arguments).read())
    if arguments.dry_run:
        changed = ssconf.pending(arguments.folder, values)
    else:
        changed = ssconf.write(arguments.folder, values)
    if arguments.json:
        result = {
            "dry_run": arguments.dry_run,
            "written": [key for key in changed if key in values],
            "removed": [key for key in changed if key not in values],
        }
        print(json.dumps(result, indent=2))
        return 0
    for key in changed:
        print(f"{'+' if key in values else '-'} ssconf_{key}")
    done = "would write" if arguments.dry_run else "wrote"
    print(f"{done} {len(changed)} of {len(values)} values" if changed else "no changes")
    return 0


def _extra_files(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from brine.config.ssconf import extra_files

    found = extra_files(store_of(arguments).read())
    if arguments.json:
        files = [
            {"path": path, "used_by": [asdict(use) for use in uses]} for path, uses in found.items()
        ]
        print(json.dumps(files, indent=2))
    else:
        for path in found:
            print(path)
    return 0


COMMAND = Command("show, change, check and undo the cluster's configuration", _configure)
