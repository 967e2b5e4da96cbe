"""The verbs of ``brine config`` and ``brine uidpool``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from brine.common import paths, uids
from brine.common.cli import print_json
from brine.common.errors import BrineError, UsageError, warn
from brine.common.own_node import note_node
from brine.common.times import iso_time, local_time
from brine.config import nodes, ssconf
from brine.config.apply import apply
from brine.config.diff import Change, changes
from brine.config.effect import in_one_line
from brine.config.model import Configuration, resolve
from brine.config.params import Mistake
from brine.config.rotation import RotationStep, begin_rotation, confirm_step, rotation
from brine.config.schema import ConfigError, read_input
from brine.config.ssconf import Ssconf, SsconfError
from brine.config.store import (
    ConfigStore,
    CorruptError,
    NoConfigError,
    Writer,
    read_configuration,
)
from brine.config.verify import find_mistakes

Pool = list[list[int]]

_INPUT_HINT = (
    "FILE is JSON, as in brine-config.data(5); "
    "what Salt's pillar declares is applied by the state brine.config"
)
_LONGEST_EVENTS = 8 * 1024 * 1024  # bytes; more than an outbox has


def apply_file(arguments: argparse.Namespace) -> int:
    """``brine config apply``"""
    store = _store(arguments)
    declared = read_input(arguments.file, _INPUT_HINT)
    with store.writing(arguments.lock_timeout, dry_run=arguments.dry_run) as writer:
        if writer.current is None:
            store.expect_none_lost()
        applied = apply(writer.current, declared, prune=arguments.prune)
        kept = _write_in_step(store, writer, applied.new)
    if store.is_usual and not arguments.dry_run:
        _note_this_node(writer.new)
    notes, ignored = [*applied.notes, *kept], list(applied.without_effect)
    if ignored:
        notes.append(f"kept, and without effect in Brine: {in_one_line(ignored)}")
    return _tell_change(arguments, writer, notes, without_effect=ignored)


def _note_this_node(configuration: Configuration) -> None:
    """Note which node this host is, if it is one; it may make the configuration without that."""
    with contextlib.suppress(ConfigError, OSError):
        found = nodes.find_this_node(configuration)
        note_node(found.uuid, found.name)


def show(arguments: argparse.Namespace) -> int:
    """``brine config show``"""
    configuration = _store(arguments).read()
    print_json(resolve(configuration, arguments.pointer))
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """``brine config verify``"""
    store = _store_of(arguments.file) if arguments.file else _store(arguments)
    configuration = store.read()
    found = find_mistakes(configuration)
    if (by := store.look().overtaken_by) is not None:
        text = f"{configuration.serial_no} {_overtaken(configuration.serial_no, by)}"
        found.append(Mistake("/serial_no", text, "older"))
    result = [{"pointer": f.where, "kind": f.kind, "text": f.text} for f in found]
    _tell(arguments, result, [*found, _counted(len(found), "fault") if found else "no faults"])
    return 1 if found else 0


def check_copy(arguments: argparse.Namespace) -> int:
    """``brine config check-copy``"""
    store = _store(arguments)
    copy = read_configuration(arguments.file).cluster
    current = None
    with contextlib.suppress(NoConfigError, CorruptError):  # any copy is better
        current = store.read().cluster
    serial_no = current.serial_no if current and current.uuid == copy.uuid else None
    if serial_no is not None and copy.serial_no < serial_no:
        name = "standard input" if arguments.file == "-" else arguments.file
        text = f"{name}: serial {copy.serial_no} is older than {serial_no}"
        hint = "brine config restore, on the master, gives an old configuration a new serial"
        raise ConfigError(f"{text}, which {store.path} has", hint=hint)
    result = {"serial": copy.serial_no, "current_serial": serial_no}
    return _tell(arguments, result, [f"serial {copy.serial_no} can replace {store.path}"])


def diff(arguments: argparse.Namespace) -> int:
    """``brine config diff``"""
    store = _store(arguments)
    if arguments.old is None:
        kept = store.versions()
        if not kept:
            raise ConfigError("no earlier version is kept, so there is nothing to compare with")
        old = store.read_version(kept[0].serial_no)
    else:
        old = _version(store, arguments.old)
    new = store.read() if arguments.new is None else _version(store, arguments.new)
    found = changes(old, new)
    result = {
        "old_serial": old.serial_no,
        "new_serial": new.serial_no,
        "changes": [dataclasses.asdict(change) for change in found],
    }
    count = _counted(len(found), "change") if found else "no changes"
    return _tell(arguments, result, [*found, f"serial {old.serial_no} -> {new.serial_no}: {count}"])


def _version(store: ConfigStore, name: str) -> Configuration:
    """A kept version by serial, the current one by its serial, or a file."""
    if not name.isdecimal():
        return _store_of(Path(name)).read()
    current = store.read()
    return current if current.serial_no == int(name) else store.read_version(int(name))


def versions(arguments: argparse.Namespace) -> int:
    """``brine config versions``"""
    result, lines = [], []
    for version in _store(arguments).versions():
        result.append(
            {
                "serial": version.serial_no,
                "written": iso_time(version.written),
                "bytes": version.size,
                "file": str(version.file),
            }
        )
        written = local_time(version.written)
        lines.append(f"{version.serial_no:>8}  {written}  {version.size:>10} bytes")
    return _tell(arguments, result, lines or ["no version is kept"])


def restore(arguments: argparse.Namespace) -> int:
    """``brine config restore``"""
    store, dry_run, notes = _store(arguments), arguments.dry_run, list[str]()

    def written(new: Configuration) -> None:
        notes.extend(_keep_in_step(store, new, dry_run=dry_run))

    writer = store.restore(
        arguments.serial, arguments.lock_timeout, dry_run=dry_run, written=written
    )
    return _tell_change(arguments, writer, notes, restored=arguments.serial)


def export_ssconf(arguments: argparse.Namespace) -> int:
    """``brine config export-ssconf``"""
    values = ssconf.all_values(_store(arguments).read())
    write = ssconf.changed_keys if arguments.dry_run else ssconf.write
    changed = write(arguments.folder, values)
    result = {
        "dry_run": arguments.dry_run,
        "written": [key for key in changed if key in values],
        "removed": [key for key in changed if key not in values],
    }
    done = f"{'would write' if arguments.dry_run else 'wrote'} {len(changed)} of {len(values)}"
    lines = [f"{'+' if key in values else '-'} ssconf_{key}" for key in changed]
    return _tell(arguments, result, [*lines, f"{done} values" if changed else "no changes"])


def export_node(arguments: argparse.Namespace) -> int:
    """``brine config export-node``"""
    configuration, data = _store(arguments).read_with_data()
    exported = nodes.export(configuration, data, nodes.find_node(configuration, arguments.node))
    print(json.dumps(dataclasses.asdict(exported), indent=2))
    return 0


def show_this_node(arguments: argparse.Namespace) -> int:
    """``brine config this-node``"""
    found = nodes.find_this_node(_store(arguments).read())
    found.warn_of_names()
    line = f"{found.name}, the master" if found.is_master else found.name
    return _tell(arguments, dataclasses.asdict(found), [line])


def rename_node(arguments: argparse.Namespace) -> int:
    """``brine config rename-node``"""
    store, dry_run, new = _store(arguments), arguments.dry_run, arguments.new
    with store.writing(arguments.lock_timeout, dry_run=dry_run) as writer:
        if writer.current is None:
            raise store.none_here()
        node = nodes.find_node(writer.current, arguments.old)
        wanted = nodes.with_new_name(writer.current, node, new)
        if store.is_usual and not dry_run:  # the new name would not lead this host to its node
            _note_this_node(writer.current)
        kept = _write_in_step(store, writer, wanted)
    notes = [] if new == node.name else _rename_notes(wanted, node.uuid, node.name)
    if store.is_usual and not dry_run:
        _note_this_node(writer.new)
    return _tell_change(arguments, writer, notes + kept, node={"uuid": node.uuid, "name": new})


def _rename_notes(configuration: Configuration, uuid: str, old: str) -> list[str]:
    """What an administrator changes beside the configuration when a node gets another name."""
    new = configuration.nodes[uuid].name
    instances = configuration.instances.values()
    count = sum(uuid in (one.primary_node, *one.secondary_nodes) for one in instances)
    places = "nodes"
    if configuration.cluster.master_node == uuid:
        places += ", cluster:master"
    if count:
        places += f", primary_node and secondary_nodes of {_counted(count, 'instance')}"
    return [
        f"pillar must say {new} in place of {old}: {places}",
        f"the host and its minion must be named {new}",
    ]


def record_events(arguments: argparse.Namespace) -> int:
    """``brine config record``"""
    store = _store(arguments)
    events = read_input(arguments.file, nodes.EVENTS_HINT, most=_LONGEST_EVENTS)
    with store.writing(arguments.lock_timeout) as writer:
        if writer.current is None:
            raise store.none_here()
        node = nodes.find_node(writer.current, arguments.node)
        new, results = nodes.record(writer.current, node, events)
        writer.write(new)
    if not arguments.json:
        for index, one in enumerate(results):
            if one.reason:
                warn(f"event {one.id or index}: {one.reason}")
    return _tell_change(arguments, writer, events=[dataclasses.asdict(one) for one in results])


def rotate_key(arguments: argparse.Namespace) -> int:
    """``brine config rotate-key``"""
    if arguments.confirmed is not None:
        found = confirm_step(arguments.confirmed)
    else:
        found = rotation() if arguments.dry_run else begin_rotation()
    is_done = found.step is RotationStep.DONE
    if arguments.json:
        done = [*RotationStep].index(found.step) / (len(RotationStep) - 1)
        told: dict[str, Any] = {"id": found.id, "step": found.step, "step_id": found.step_id}
        told |= {"state": "done" if is_done else "committed", "error": None}
        told |= {"progress": {"done": round(done, 3), "text": found.step}}
        print_json(told | {"keys": found.keys.digests() if found.keys else None})
    elif is_done:
        print("no rotation of the key is pending")
    else:
        print(f"all nodes have to {found.step} the new key, and to confirm that")
        print(f"then: brine config rotate-key --confirmed {found.step_id}")
    return 0


def list_extra_files(arguments: argparse.Namespace) -> int:
    """``brine config extra-files``"""
    found = ssconf.extra_files(_store(arguments).read())
    result = [
        {"path": path, "used_by": [dataclasses.asdict(use) for use in uses]}
        for path, uses in found.items()
    ]
    return _tell(arguments, result, found)


# The pool of user ids.


def show_pool(arguments: argparse.Namespace) -> int:
    """``brine uidpool show``"""
    store = _store(arguments)
    source = store.path
    try:
        pool = store.read().cluster.uid_pool
    except NoConfigError:
        if not store.is_usual:
            raise
        # Nodes without a configuration have it in ssconf.
        source = paths.SSCONF_DIR / "ssconf_uid_pool"
        pool = Ssconf(paths.SSCONF_DIR).uid_pool()
    _expect_sound(pool, source)
    text, count = uids.format_uid_pool(pool, ","), uids.count_uids(pool)
    if not pool and not arguments.json:
        # Not to standard output, which "set" takes.
        print("the pool is empty: no user ids are given out", file=sys.stderr)
    result = {"uid_pool": text, "ranges": pool, "count": count, "source": str(source)}
    return _tell(arguments, result, [text] if pool else [])


def change_pool(arguments: argparse.Namespace) -> int:
    """``brine uidpool add``, ``remove`` and ``set``: in the configuration, and in this node's
    ssconf."""
    changed = _CHANGES[arguments.change]
    try:
        given = uids.parse_uid_pool(",".join(arguments.ranges))
    except uids.UidPoolError as error:
        raise UsageError(str(error), hint="see brine-uidpool(1)") from error
    if not given and arguments.change != "set":
        raise UsageError("no user ids are given", hint="such as 4000-4099,5000")
    found = uids.accounts_among(given) if arguments.change != "remove" else {}
    told = f"accounts of this node have some of these, and keep them: {uids.listed(found)}"
    notes = [told] if found else []
    store = _store(arguments)
    with store.writing(arguments.lock_timeout, dry_run=arguments.dry_run) as writer:
        old = writer.current
        if old is None:
            raise _none_to_change(store)
        if arguments.change != "set":  # which mends a pool with a fault
            _expect_sound(old.cluster.uid_pool, store.path)
        pool = changed(old.cluster.uid_pool, given)
        cluster = dataclasses.replace(old.cluster, uid_pool=pool)
        notes += _write_in_step(store, writer, dataclasses.replace(old, cluster=cluster))
    return _tell_change(arguments, writer, notes, uid_pool=uids.format_uid_pool(pool, ","))


_CHANGES: dict[str, Callable[[Pool, Pool], Pool]] = {
    "add": uids.add_to_uid_pool,
    "remove": uids.remove_from_uid_pool,
    "set": uids.replace_uid_pool,
}


def _expect_sound(pool: Pool, source: Path) -> None:
    if fault := uids.uid_pool_fault(pool):
        hint = "brine uidpool set RANGES, on the master, replaces it"
        raise uids.UidPoolError(f"{source}: uid_pool: {fault}", hint=hint)


def _none_to_change(store: ConfigStore) -> NoConfigError:
    """The error to raise where there is no configuration: mostly, this is not the master."""
    error = store.none_here()
    if store.is_usual and not store.versions():
        with contextlib.suppress(SsconfError):  # then we do not know better
            master = Ssconf(paths.SSCONF_DIR).master_node()
            error.hint = f"the pool is changed on the master, {master}"
    return error


# This node's ssconf, which changes with the configuration, once it is there.


def _write_in_step(store: ConfigStore, writer: Writer, wanted: Configuration) -> list[str]:
    """Write a configuration, and have this node's programs know what it says; returns remarks."""
    if _has_ssconf(store):
        ssconf.all_values(wanted)  # what can't be stops us here
    writer.write(wanted)
    return _keep_in_step(store, wanted, dry_run=writer.dry_run)


def _has_ssconf(store: ConfigStore) -> bool:
    return store.is_usual and paths.SSCONF_DIR.is_dir()


def _keep_in_step(store: ConfigStore, written: Configuration, *, dry_run: bool) -> list[str]:
    """Have this node's programs know what the configuration says; returns a remark on it. The
    caller holds the store's lock, or a slower one would put older values over ours."""
    folder = paths.SSCONF_DIR
    if not _has_ssconf(store):
        return []
    try:
        values = ssconf.all_values(written)
        change = ssconf.changed_keys if dry_run else ssconf.write
        if not change(folder, values):
            return []
    except BrineError as error:
        error.hint = f"the configuration has it; then brine config export-ssconf {folder}"
        raise
    if dry_run:
        return [f"{folder} would be brought up to date"]
    return [f"{folder} is up to date; the other nodes need a copy of it"]


# What all verbs have in common.


def _store(arguments: argparse.Namespace) -> ConfigStore:
    """The store of the configuration that the command line names."""
    if not 0 <= arguments.lock_timeout < 1e6:
        raise UsageError("--lock-timeout must be a number of seconds, 0 or more")
    return ConfigStore(Path(arguments.config).absolute())


def _store_of(file: Path) -> ConfigStore:
    """The store of a file that a person names to look at; it must be there."""
    if not os.path.lexists(file):
        raise ConfigError(f"{file}: there is no such file")
    return ConfigStore(file.absolute())


def _tell(arguments: argparse.Namespace, result: object, lines: Iterable[object]) -> int:
    """Print *result* for programs, or *lines* for people; returns the exit status."""
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        for line in lines:
            print(line)
    return 0


def _tell_change(
    arguments: argparse.Namespace,
    writer: Writer,
    notes: Sequence[str] = (),
    *,
    restored: int | None = None,
    **more: Any,
) -> int:
    """Print what a writer changed, or would change, with *notes* for people, and *more* for
    programs; *restored* is the serial number of the restored version."""
    old, new, dry_run = writer.old, writer.new, writer.dry_run
    found = changes(old, new)
    if old and writer.overtaken_by is not None:
        found.append(Change("changed", "/serial_no", old.serial_no, new.serial_no))
    notes = [*notes, *_aside_notes(writer)]
    if restored is not None and not (old and old.serial_no == new.serial_no):
        done = "would restore" if dry_run else "restored"
        in_one_line = f"{done}: the content of serial {restored}, as {new.serial_no}"
    elif not found:
        in_one_line = f"no changes: serial {new.serial_no}"
    elif dry_run:
        in_one_line = f"would apply: {_counted(len(found), 'change')}"
    else:
        before = f"{old.serial_no} -> " if old else ""
        in_one_line = f"applied: serial {before}{new.serial_no}, {_counted(len(found), 'change')}"
    result = {
        "dry_run": dry_run,
        "old_serial": old.serial_no if old else None,
        "new_serial": None if dry_run else new.serial_no,
        "changes": [dataclasses.asdict(change) for change in found],
        "notes": notes,
    }
    # Before a restore there may be a damaged file, or none: then everything would be a change.
    lines = found if old or restored is None else []
    noted = (f"note: {note}" for note in notes)
    return _tell(arguments, result | more, [*lines, *noted, in_one_line])


def _overtaken(serial_no: int, by: int) -> str:
    """A remark on a configuration that is older than a kept version, or has the serial number of a
    different one."""
    if by == serial_no:
        return f"is not kept version {by}, but has its serial number"
    return f"is older than kept version {by}"


def _aside_notes(writer: Writer) -> list[str]:
    """A remark on a file that no writer of Brine has written."""
    old, by, aside = writer.old, writer.overtaken_by, writer.aside
    if old and by is not None:
        has = "had" if aside else "has"
        what = f"{writer.path} {has} serial {old.serial_no}, which {_overtaken(old.serial_no, by)}"
        where = f"; that file is kept as {aside}" if aside else ""
        return [f"{what}: serial numbers go on from the highest there was{where}"]
    return [f"the damaged file is kept as {aside}"] if aside else []


def _counted(number: int, noun: str) -> str:
    """A number with its noun: ``1 change``, ``2 changes``."""
    return f"{number} {noun}{'s' * (number != 1)}"
