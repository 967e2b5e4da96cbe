"""The verbs of ``brine uidpool``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError, UsageError
from brine.common.uids import (
    UidPoolError,
    accounts_among,
    add_to_uid_pool,
    count_uids,
    format_uid_pool,
    listed,
    parse_uid_pool,
    remove_from_uid_pool,
    replace_uid_pool,
    uid_pool_fault,
)
from brine.config import ssconf
from brine.config.commands import ConfigChange, store_of
from brine.config.ssconf import Ssconf, SsconfError
from brine.config.store import ConfigStore, NoConfigError

Pool = list[list[int]]


def show(arguments: argparse.Namespace) -> int:
    """``brine uidpool show``"""
    pool, source = _read(store_of(arguments))
    _expect_sound(pool, source)
    text = format_uid_pool(pool, ",")
    if arguments.json:
        shown = {
            "uid_pool": text,
            "ranges": pool,
            "count": count_uids(pool),
            "source": str(source),
        }
        print(json.dumps(shown, indent=2))
    elif pool:
        print(text)
    else:
        # Not to standard output, which "set" takes.
        print("the pool is empty: no user ids are given out", file=sys.stderr)
    return 0


def _read(store: ConfigStore) -> tuple[Pool, Path]:
    """The pool, and the file it is from: nodes without a configuration have it in ssconf."""
    try:
        return store.read().cluster.uid_pool, store.path
    except NoConfigError:
        if not store.is_usual:
            raise
    pool = Ssconf(paths.SSCONF_DIR).uid_pool()
    return [list(pair) for pair in pool], paths.SSCONF_DIR / "ssconf_uid_pool"


def add(arguments: argparse.Namespace) -> int:
    """``brine uidpool add``"""
    given = _given(arguments, needed=True)
    return _change(arguments, lambda pool: add_to_uid_pool(pool, given), _accounts_among(given))


def remove(arguments: argparse.Namespace) -> int:
    """``brine uidpool remove``"""
    given = _given(arguments, needed=True)
    return _change(arguments, lambda pool: remove_from_uid_pool(pool, given))


def replace_pool(arguments: argparse.Namespace) -> int:
    """``brine uidpool set``"""
    given = _given(arguments)
    # Whatever is wrong with the old pool does not matter any more.
    return _change(
        arguments, lambda pool: replace_uid_pool(pool, given), _accounts_among(given), mend=True
    )


def _given(arguments: argparse.Namespace, *, needed: bool = False) -> Pool:
    try:
        given = parse_uid_pool(",".join(arguments.ranges))
    except UidPoolError as error:
        raise UsageError(str(error), hint="see brine-uidpool(1)") from error
    if needed and not given:
        raise UsageError("no user ids are given", hint="such as 4000-4099,5000")
    return given


def _change(
    arguments: argparse.Namespace,
    changed: Callable[[Pool], Pool],
    notes: Sequence[str] = (),
    *,
    mend: bool = False,
) -> int:
    """Change the pool in the configuration, and in this node's ssconf.

    :param changed: makes the new pool of the old one.
    :param notes: what a person should know.
    :param mend: the old pool may have a fault.
    """
    store, dry_run = store_of(arguments), arguments.dry_run
    folder = paths.SSCONF_DIR if store.is_usual and paths.SSCONF_DIR.is_dir() else None
    with store.writing(arguments.lock_timeout, dry_run=dry_run) as writer:
        old = writer.current
        if old is None:
            raise _none_to_change(store)
        if not mend:
            _expect_sound(old.cluster.uid_pool, store.path)
        cluster = dataclasses.replace(old.cluster, uid_pool=changed(old.cluster.uid_pool))
        wanted = dataclasses.replace(old, cluster=cluster)
        values = ssconf.export(wanted) if folder else {}  # what can't be stops us here
        done = writer.replace(wanted)
        if folder:
            # Within the lock, or a slower one would put older values over ours.
            notes = [*notes, *_keep_in_step(folder, values, dry_run=dry_run)]
    change = ConfigChange.of(done, notes, dry_run=dry_run)
    if arguments.json:
        text = format_uid_pool(done.new.cluster.uid_pool, ",")
        print(json.dumps(change.to_json() | {"uid_pool": text}, indent=2))
    else:
        change.tell()
    return 0


def _expect_sound(pool: Pool, source: Path) -> None:
    if fault := uid_pool_fault(pool):
        hint = "brine uidpool set RANGES, on the master, replaces it"
        raise UidPoolError(f"{source}: uid_pool: {fault}", hint=hint)


def _none_to_change(store: ConfigStore) -> NoConfigError:
    """The error to raise where there is no configuration: mostly, this is not the master."""
    error = store.none_here()
    if store.is_usual and not store.versions():
        with contextlib.suppress(SsconfError):  # then we do not know better
            master = Ssconf(paths.SSCONF_DIR).master_node()
            error.hint = f"the pool is changed on the master, {master}"
    return error


def _keep_in_step(folder: Path, values: Mapping[str, str], *, dry_run: bool) -> list[str]:
    """Have this node's programs know what the configuration says, and tell of it."""
    if dry_run:
        pending = ssconf.pending(folder, values)
        return [f"{folder} would be brought up to date"] if pending else []
    try:
        changed = ssconf.write(folder, values)
    except BrineError as error:
        error.hint = f"the configuration has it; then brine config export-ssconf {folder}"
        raise
    return [f"{folder} is up to date; the other nodes need a copy of it"] if changed else []


def _accounts_among(ranges: Pool) -> list[str]:
    """A note, if numbers are those of accounts of this node, which keep them."""
    found = accounts_among(ranges)
    if not found:
        return []
    return [f"accounts of this node have some of these, and keep them: {listed(found)}"]
