"""``brine --complete``: what may follow the words of a command line, for the shells.

The parsers of all installed parts say which commands, verbs, options and choices there are. What
else a word may be depends on its place, and the tables of this module say where such words come
from. The functions of bash, zsh and fish only show what this prints: a line for each word, with its
description after a tab, or ``:files``, ``:folders``, ``:users`` or ``:groups``, which the shell
knows.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from brine.common import paths
from brine.common.errors import printable

_LONGEST = 72


class WordPlace(NamedTuple):
    """Where the word stands that is to be completed.

    :param command: the noun, the verb, and what further names a parser.
    :param words: what was given by place, after the command, in their order.
    """

    command: tuple[str, ...]
    words: tuple[str, ...]


Source = Callable[[WordPlace], Iterable[str]]


def _files(_: WordPlace) -> Iterable[str]:
    return (":files",)


def _folders(_: WordPlace) -> Iterable[str]:
    return (":folders",)


def _users(_: WordPlace) -> Iterable[str]:
    return (":users",)


def _groups(_: WordPlace) -> Iterable[str]:
    return (":groups",)


def _nothing(_: WordPlace) -> Iterable[str]:
    return ()


def _fixed(*words: str) -> Source:
    return lambda _: words


def _names(folder: str, *suffixes: str, below: str = "") -> Source:
    """The names of the files in a folder of :mod:`brine.common.paths`, or in one *below* it,
    without one of these suffixes."""

    def names(_: WordPlace) -> Iterator[str]:
        with suppress(OSError):
            for name in sorted(os.listdir(getattr(paths, folder) / below)):
                for suffix in suffixes:
                    if name.endswith(suffix) and not name.startswith("."):
                        yield name.removesuffix(suffix)

    return names


def _both(*sources: Source) -> Source:
    return lambda place: (word for source in sources for word in source(place))


def _ssconf(key: str, column: int = 0) -> Source:
    """A value that every node knows of the cluster, such as ``node_list``."""

    def words(_: WordPlace) -> Iterator[str]:
        with suppress(OSError, UnicodeDecodeError):
            for line in (paths.SSCONF_DIR / f"ssconf_{key}").read_text().splitlines():
                if len(parts := line.split()) > column:
                    yield parts[column]

    return words


def _column(*command: str) -> Source:
    """The first words of the table that a command prints; ``{}`` is the first word given."""

    def words(place: WordPlace) -> Iterator[str]:
        first = place.words[0] if place.words else ""
        for row in _output(*(first if one == "{}" else one for one in command))[1:]:
            if row and not row[0].isspace():
                yield row.split()[0]

    return words


def _units(*types: str) -> Source:
    """The names of the storage units of these types; without any, of the type that is given."""

    def words(place: WordPlace) -> Iterator[str]:
        for kind in types or place.words[:1]:
            for row in _output("storage", "list", "--type", kind)[1:]:
                if row.startswith(kind):
                    yield row.split()[1]

    return words


def _output(*command: str) -> list[str]:
    """The lines that a command prints."""
    with suppress(OSError, subprocess.TimeoutExpired):
        run = subprocess.run(
            ["brine", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        return run.stdout.splitlines()
    return []


_SPECS = _names("SPECS_DIR", ".json")
_RUNNING = _names("CONTROL_DIR", ".qmp")
_KNOWN = _names("CONTROL_DIR", ".kvmd", ".qmp", ".shutdown", ".stopping")
_OPERATIONS = _both(_names("OPERATIONS_DIR", ".json"), _names("VOLATILE_OPERATIONS_DIR", ".json"))
_VERSIONS = _names("STATE_DIR", "", below="config.versions")
_NODES = _ssconf("node_list")
_CLUSTERS = _ssconf("instance_list")
_UNITS = _units("lvm-vg", "file")


def _bridges(_: WordPlace) -> Iterator[str]:
    for file in sorted(Path("/sys/class/net").glob("*/bridge")):
        yield file.parent.name


def _sockets(_: WordPlace) -> Iterator[str]:
    for name in _RUNNING(_):
        yield f"{paths.CONTROL_DIR}/{name}.qmp"


# What a word is called in help says most; the longest beginning of a command counts first.

_BY_NAME: dict[str, Source] = {
    "INSTANCE": _SPECS,
    "NODE": _NODES,
    "FILE": _files,
    "IMAGE": _files,
    "MEDIUM": _files,
    "DIR": _folders,
    "BRIDGE": _bridges,
    "UNIT": _UNITS,
    "DISK": _column("disk", "status", "{}"),
    "SNAPSHOT": _column("disk", "snapshot", "{}", "--list"),
    "SERIAL": _VERSIONS,
    "WHEN": _fixed("1h", "1d", "1w"),
    "SOCKET": _sockets,
}

_BY_PLACE: dict[tuple[str, ...], Source] = {
    ("kvmd", "verdicts", "INSTANCE"): _KNOWN,
    ("nic", "INSTANCE"): _RUNNING,
    ("disk", "list", "INSTANCE"): _RUNNING,
    ("disk", "snapshot", "--remove"): _column("disk", "snapshot", "{}", "--list"),
    ("disk", "--group"): _groups,
    ("instance", "migrate", "INSTANCE"): _CLUSTERS,
    ("move", "begin", "INSTANCE"): _CLUSTERS,
    ("move", "compare", "INSTANCE"): _CLUSTERS,
    ("move", "ID"): _OPERATIONS,
    ("operations", "ID"): _OPERATIONS,
    ("outbox", "ID"): _names("OUTBOX_DIR", ".json"),
    ("tap", "NAME"): _names("TAPS_DIR", ".json"),
    ("tap", "--user"): _users,
    ("tap", "--group"): _groups,
    ("tap", "--link"): _bridges,
    ("nic", "--link"): _bridges,
    ("storage", "NAME"): _units(),
    ("storage", "create", "DIR"): _folders,
    ("storage", "remove", "DIR"): _units("file"),
    ("storage", "orphans", "UUID"): _column("storage", "orphans"),
    ("watcher", "pause", "TIME"): _fixed("30m", "2h", "1d"),
    ("node", "claims", "--forget"): _column("node", "claims"),
    ("lock", "--instance"): _both(_CLUSTERS, _SPECS),
    ("lock", "--node"): _NODES,
    ("lock", "--group"): _ssconf("nodegroups", 1),
    ("lock", "--storage"): _UNITS,
    ("uidpool", "remove", "RANGES"): _ssconf("uid_pool"),
    ("config", "diff", "OLD"): _both(_VERSIONS, _files),
    ("config", "diff", "NEW"): _both(_VERSIONS, _files),
    ("config", "rename-node", "OLD"): _NODES,
    ("config", "show", "POINTER"): _fixed(
        *("/cluster", "/disks", "/instances", "/networks", "/nodegroups", "/nodes", "/serial_no")
    ),
    ("confd", "--peer"): _ssconf("master_candidates_ips"),
    ("confd", "--coverage"): _fixed("all"),
    ("confd", "query", "node-role"): _NODES,
    ("confd", "query", "node-drbd"): _NODES,
    ("confd", "query", "node-instances"): _NODES,
    ("confd", "query", "instance-disks"): _CLUSTERS,
    ("confd", "query", "instance-primary-node"): _CLUSTERS,
    ("confd", "query", "config"): _fixed("/cluster", "/instances", "/nodes"),
}


def complete(
    words: Sequence[str],
    nouns: Iterable[tuple[str, str]],
    parser_of: Callable[[str, str | None], argparse.ArgumentParser | None],
) -> Iterator[str]:
    """The lines for a command line.

    :param words: those after ``brine``; the last one is to be completed, and may be empty.
    :param nouns: the commands, with their summaries.
    :param parser_of: makes the parser of a noun, and a verb, or of all verbs; None if there is
        none.
    """
    *before, current = words or [""]
    noun = before[0] if before else ""
    if not before:
        found: Iterable[tuple[str, str]] = nouns
        if current.startswith("-"):
            found = [("--help", "show all commands"), ("--version", "show the version")]
    else:
        verb = before[1] if len(before) > 1 else None
        parser = parser_of(noun, verb)
        found = _found(parser, (noun,), before[1:], current) if parser else ()
    for word, text in found:
        if word.startswith((current, ":")):
            text = printable(" ".join(text.partition(" (default: %")[0].split()))[:_LONGEST]
            yield f"{word}\t{text}" if text else word


def _found(
    parser: argparse.ArgumentParser, command: tuple[str, ...], before: Sequence[str], current: str
) -> Iterator[tuple[str, str]]:
    """The words that may follow others, with their descriptions."""
    given: list[str] = []
    option: argparse.Action | None = None
    used: set[str] = set()
    for index, word in enumerate(before):
        if word == "--":
            return
        if option:
            option = None
        elif word.startswith("-") and word != "-":
            name, equals, _ = word.partition("=")
            action = parser._option_string_actions.get(name)
            used.add(action.dest if action else "")
            option = action if action and action.nargs != 0 and not equals else None
        elif (step := _by_place(parser, len(given))) and isinstance(
            step, argparse._SubParsersAction
        ):
            if isinstance(inner := step.choices.get(word), argparse.ArgumentParser):
                yield from _found(inner, (*command, word), before[index + 1 :], current)
            return
        else:
            given.append(word)
    place = WordPlace(command, tuple(given))
    if option:
        yield from _values(option, option.option_strings[-1], place)
    elif current.startswith("-"):
        for each in parser._actions:
            if each.help != argparse.SUPPRESS and (each.dest not in used or _repeats(each)):
                yield from ((name, each.help or "") for name in each.option_strings)
    elif step := _by_place(parser, len(given)):
        yield from _values(step, str(step.metavar or ""), place)


def _by_place(parser: argparse.ArgumentParser, number: int) -> argparse.Action | None:
    """The argument that the word of a number, from 0, is."""
    for action in parser._get_positional_actions():
        if number == 0 or action.nargs in ("*", "+"):
            return action
        number -= 1
    return None


def _repeats(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)


def _values(action: argparse.Action, name: str, place: WordPlace) -> Iterator[tuple[str, str]]:
    if isinstance(action, argparse._SubParsersAction):
        texts = {one.dest: one.help or "" for one in action._choices_actions}
        yield from ((word, texts.get(word, "")) for word in action.choices)
        return
    if action.choices is not None:
        yield from ((str(word), "") for word in action.choices)
        return
    is_many = action.nargs in ("*", "+")
    for word in _source(name, str(action.metavar or ""), place.command)(place):
        if not (is_many and word in place.words):
            yield word, ""


def _source(name: str, metavar: str, command: tuple[str, ...]) -> Source:
    """The source of the words at a place: an option by its name, others by what help calls them."""
    for end in range(len(command), 0, -1):
        if found := _BY_PLACE.get((*command[:end], name)):
            return found
    if not name.startswith("-") and (found := _BY_PLACE.get(command)):
        return found
    return _BY_NAME.get(metavar, _nothing)
