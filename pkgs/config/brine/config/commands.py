"""The verbs of ``brine config``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from brine.common.errors import UsageError
from brine.config import ssconf
from brine.config.apply import apply
from brine.config.diff import Change, ChangeKind, changes
from brine.config.model import Configuration, resolve
from brine.config.params import Mistake
from brine.config.schema import ConfigError, parse_json
from brine.config.store import ConfigStore, Replaced
from brine.config.verify import find, find_misplaced


def store_of(arguments: argparse.Namespace) -> ConfigStore:
    """The store of the configuration that the command line names.

    :raises UsageError: if the timeout is not valid.
    :raises ConfigError: see :class:`ConfigStore`.
    """
    if not 0 <= arguments.lock_timeout < 1e6:
        raise UsageError("--lock-timeout must be a number of seconds, 0 or more")
    return ConfigStore(Path(arguments.config).absolute())


def apply_file(arguments: argparse.Namespace) -> int:
    """``brine config apply``"""
    store = store_of(arguments)
    declared = _read_input(arguments.file)
    with store.writing(arguments.lock_timeout, dry_run=arguments.dry_run) as writer:
        if writer.current is None:
            store.expect_none_lost()
        applied = apply(writer.current, declared, prune=arguments.prune)
        done = writer.replace(applied.new)
    ConfigChange.of(done, applied.notes, dry_run=arguments.dry_run).tell(as_json=arguments.json)
    return 0


def _read_input(name: str) -> Any:
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


def show(arguments: argparse.Namespace) -> int:
    """``brine config show``"""
    configuration = store_of(arguments).read()
    print(json.dumps(resolve(configuration, arguments.pointer), indent=2, ensure_ascii=False))
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """``brine config verify``"""
    store = ConfigStore(arguments.file.absolute()) if arguments.file else store_of(arguments)
    configuration = store.read()
    found = find(configuration) + find_misplaced(parse_json(store.read_bytes()))
    if (by := store.overtaken_by(configuration)) is not None:
        text = f"{configuration.serial_no} {_overtaken(configuration.serial_no, by)}"
        found.append(Mistake("/serial_no", text, "older"))
    if arguments.json:
        lines = [{"pointer": f.where, "kind": f.kind, "text": f.text} for f in found]
        print(json.dumps(lines, indent=2))
    else:
        for fault in found:
            print(fault)
        print(_counted(len(found), "fault") if found else "no faults")
    return 1 if found else 0


def diff(arguments: argparse.Namespace) -> int:
    """``brine config diff``"""
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
        count = _counted(len(found), "change") if found else "no changes"
        print(f"serial {old.serial_no} -> {new.serial_no}: {count}")
    return 0


def _version(store: ConfigStore, name: str) -> Configuration:
    """A kept version by serial, the current one by its serial, or a file."""
    if not name.isdecimal():
        return ConfigStore(Path(name).absolute()).read()
    current = store.read()
    return current if current.serial_no == int(name) else store.read_version(int(name))


def versions(arguments: argparse.Namespace) -> int:
    """``brine config versions``"""
    kept = [
        (version, datetime.fromtimestamp(version.written, UTC))
        for version in store_of(arguments).versions()
    ]
    if arguments.json:
        lines = [
            {
                "serial": version.serial_no,
                "written": time.isoformat(timespec="seconds"),
                "bytes": version.size,
                "file": str(version.file),
            }
            for version, time in kept
        ]
        print(json.dumps(lines, indent=2))
        return 0
    for version, time in kept:
        local = time.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        print(f"{version.serial_no:>8}  {local}  {version.size:>10} bytes")
    if not kept:
        print("no version is kept")
    return 0


def restore(arguments: argparse.Namespace) -> int:
    """``brine config restore``"""
    done = store_of(arguments).restore(
        arguments.serial, arguments.lock_timeout, dry_run=arguments.dry_run
    )
    change = ConfigChange.of(done, dry_run=arguments.dry_run)
    change.tell(as_json=arguments.json, restored=arguments.serial)
    return 0


def export_ssconf(arguments: argparse.Namespace) -> int:
    """``brine config export-ssconf``"""
    values = ssconf.export(store_of(arguments).read())
    write = ssconf.pending if arguments.dry_run else ssconf.write
    changed = write(arguments.folder, values)
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


def list_extra_files(arguments: argparse.Namespace) -> int:
    """``brine config extra-files``"""
    found = ssconf.extra_files(store_of(arguments).read())
    if arguments.json:
        files = [
            {"path": path, "used_by": [asdict(use) for use in uses]} for path, uses in found.items()
        ]
        print(json.dumps(files, indent=2))
    else:
        for path in found:
            print(path)
    return 0


# The output of a change of the configuration, for people and for programs.


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """The result of a change, or of a dry run.

    :param old: the former configuration; None if there was none that can be used.
    :param new: the present one.
    :param notes: remarks for people.
    """

    old: Configuration | None
    new: Configuration
    changes: Sequence[Change]
    notes: Sequence[str]
    dry_run: bool

    @classmethod
    def of(cls, done: Replaced, notes: Iterable[str] = (), *, dry_run: bool) -> ConfigChange:
        """The result of a change of the file.

        If the old configuration was overtaken, its serial number is one of the changes.

        :param notes: further remarks for people.
        """
        old, new = done.old, done.new
        found = changes(old, new)
        if old and done.overtaken_by is not None:
            found.append(Change(ChangeKind.CHANGED, "/serial_no", old.serial_no, new.serial_no))
        return cls(old, new, found, [*notes, *_aside_notes(done)], dry_run)

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "dry_run": self.dry_run,
            "old_serial": self.old.serial_no if self.old else None,
            "new_serial": None if self.dry_run else self.new.serial_no,
            "changes": [change.to_json() for change in self.changes],
            "notes": list(self.notes),
        }

    def tell(self, *, as_json: bool = False, restored: int | None = None) -> None:
        """Print each change, the notes, and the serial numbers.

        :param restored: serial number of the restored version.
        """
        if as_json:
            print(json.dumps(self.to_json(), indent=2))
            return
        # Before a restore there may be a damaged file, or none: then everything would be a change.
        for change in self.changes if self.old or restored is None else ():
            print(change)
        for note in self.notes:
            print(f"note: {note}")
        print(self._summary() if restored is None else self._restored_summary(restored))

    def _summary(self) -> str:
        count = _counted(len(self.changes), "change")
        if not self.changes:
            return f"no changes: serial {self.new.serial_no}"
        if self.dry_run:
            return f"would apply: {count}"
        before = f"{self.old.serial_no} -> " if self.old else ""
        return f"applied: serial {before}{self.new.serial_no}, {count}"

    def _restored_summary(self, serial_no: int) -> str:
        if self.old and self.old.serial_no == self.new.serial_no:
            return f"no changes: serial {self.new.serial_no}"
        done = "would restore" if self.dry_run else "restored"
        return f"{done}: the content of serial {serial_no}, as {self.new.serial_no}"


def _overtaken(serial_no: int, by: int) -> str:
    """A remark on a configuration that is older than a kept version, or has the serial number of a
    different one."""
    if by == serial_no:
        return f"is not kept version {by}, but has its serial number"
    return f"is older than kept version {by}"


def _aside_notes(done: Replaced) -> list[str]:
    """A remark on a file that no writer of Brine has written."""
    old, by, aside = done.old, done.overtaken_by, done.aside
    if old and by is not None:
        has = "had" if aside else "has"
        what = f"{done.path} {has} serial {old.serial_no}, which {_overtaken(old.serial_no, by)}"
        where = f"; that file is kept as {aside}" if aside else ""
        return [f"{what}: serial numbers go on from the highest there was{where}"]
    return [f"the damaged file is kept as {aside}"] if aside else []


def _counted(number: int, noun: str) -> str:
    """A number with its noun: ``1 change``, ``2 changes``."""
    return f"{number} {noun}{'s' * (number != 1)}"
