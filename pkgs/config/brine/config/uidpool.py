"""``brine uidpool``: the user ids that are kept for processes of ours, shown and changed."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from brine.common import paths
from brine.common.cli import Command
from brine.common.errors import BrineError, UsageError
from brine.config.cli import add_store_options, store_of

if TYPE_CHECKING:
    from pathlib import Path

    from brine.config.store import ConfigStore, NoConfigError


Pool = list[list[int]]

# What takes time to import is imported where it is needed: `brine --help` loads this module.


def _show(arguments: argparse.Namespace) -> int:
    from brine.common.uids import count_uids, format_uid_pool

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
    from brine.config.store import NoConfigError

    try:
        return store.read().cluster.uid_pool, store.path
    except NoConfigError:
        if not store.is_usual:
            raise
    from brine.config.ssconf import Ssconf

    pool = Ssconf(paths.SSCONF_DIR).uid_pool()
    return [list(pair) for pair in pool], paths.SSCONF_DIR / "ssconf_uid_pool"


def _add(arguments: argparse.Namespace) -> int:
    from brine.common.uids import add_to_uid_pool

    given = _given(arguments, needed=True)
    return _change(arguments, lambda pool: add_to_uid_pool(pool, given), _accounts_among(given))


def _remove(arguments: argparse.Namespace) -> int:
    from brine.common.uids import remove_from_uid_pool

    given = _given(arguments, needed=True)
    return _change(arguments, lambda pool: remove_from_uid_pool(pool, given))


def _set(arguments: argparse.Namespace) -> int:
    from brine.common.uids import replace_uid_pool

    given = _given(arguments)
    # Whatever is wrong with the old pool does not matter any more.
    return _change(
        arguments, lambda pool: replace_uid_pool(pool, given), _accounts_among(given), mend=True
    )


def _given(arguments: argparse.Namespace, *, needed: bool = False) -> Pool:
    from brine.common.uids import UidPoolError, parse_uid_pool

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
    from dataclasses import replace

    from brine.common.uids import format_uid_pool
    from brine.config import ssconf
    from brine.config.outcome import outcome_of
    from brine.config.store import Replaced

    store, dry_run = store_of(arguments), arguments.dry_run
    folder = paths.SSCONF_DIR if store.is_usual and paths.SSCONF_DIR.is_dir() else None
    with store.writing(arguments.lock_timeout, dry_run=dry_run) as writer:
        old, overtaken_by = writer.current, writer.standing.overtaken_by
        if old is None:
            raise _none_to_change(store)
        if not mend:
            _expect_sound(old.cluster.uid_pool, store.path)
        cluster = replace(old.cluster, uid_pool=changed(old.cluster.uid_pool))
        wanted = replace(old, cluster=cluster)
        values = ssconf.export(wanted) if folder else {}  # what can't be stops us here
        new = writer.write(wanted)
        if folder:
            # Within the lock, or a slower one would put older values over ours.
            notes = [*notes, *_keep_in_step(folder, values, dry_run=dry_run)]
    done = Replaced(store.path, old, new, writer.aside, overtaken_by)
    outcome = outcome_of(done, notes, dry_run=dry_run)
    if arguments.json:
        text = format_uid_pool(new.cluster.uid_pool, ",")
        print(json.dumps(outcome.to_json() | {"uid_pool": text}, indent=2))
    else:
        outcome.print_applied()
    return 0


def _expect_sound(pool: Pool, source: Path) -> None:
    from brine.common.uids import UidPoolError, uid_pool_fault

    if fault := uid_pool_fault(pool):
        hint = "brine uidpool set RANGES, on the master, replaces it"
        raise UidPoolError(f"{source}: uid_pool: {fault}", hint=hint)


def _none_to_change(store: ConfigStore) -> NoConfigError:
    """The error to raise where there is no configuration: mostly, this is not the master."""
    from brine.config.ssconf import Ssconf, SsconfError

    error = store.none_here()
    if store.is_usual and not store.versions():
        with contextlib.suppress(SsconfError):  # then we do not know better
            master = Ssconf(paths.SSCONF_DIR).master_node()
            error.hint = f"the pool is changed on the master, {master}"
    return error


def _keep_in_step(folder: Path, values: Mapping[str, str], *, dry_run: bool) -> list[str]:
    """Have this node's programs know what the configuration says, and tell of it."""
    from brine.config import ssconf

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
    from brine.common.uids import accounts_among, listed

    found = accounts_among(ranges)
    if not found:
        return []
    return [f"accounts of this node have some of these, and keep them: {listed(found)}"]


# The command line.


def _configure(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    show = commands.add_parser("show", help="print the pool", allow_abbrev=False)
    show.add_argument("--json", action="store_true", help="for programs")
    show.set_defaults(run=_show)

    for name, run, help_ in (
        ("add", _add, "put user ids into the pool"),
        ("remove", _remove, "take user ids out of the pool"),
        ("set", _set, "replace the pool; '' empties it"),
    ):
        change = commands.add_parser(name, help=help_, allow_abbrev=False)
        change.add_argument(
            "ranges",
            nargs="+",
            metavar="RANGES",
            help="user ids and ranges, such as 4000-4099,5000",
        )
        change.add_argument("--dry-run", action="store_true", help="only say what would change")
        change.add_argument("--json", action="store_true", help="for programs")
        change.set_defaults(run=run)


COMMAND = Command("show and change the pool of user ids for processes of VMs", _configure)
