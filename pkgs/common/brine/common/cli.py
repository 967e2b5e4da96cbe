"""The ``brine`` command: the sub-commands that parts add, and types of options.

A distribution adds one by an entry point of the group ``brine.commands`` that names a
:class:`Command`; installing ``brine-kvmd`` is what makes ``brine kvmd`` exist. It adds verbs to the
command of another part by an entry point of the group ``brine.verbs`` with that command's name: a
function of the command's verbs, for :func:`add_verb`. The command is there with these alone if the
other part is not installed.
``verbs.choices[NAME]`` is the parser of a verb that is there, which may get further options. What a
verb waits for may be begun before the verb is loaded: see :func:`brine.common.ahead.begin_ahead`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from brine.common import __version__
from brine.common.entry_points import EntryPoint, entry_points, installed_versions
from brine.common.errors import BrineError, UsageError, die, nearest, root_hint
from brine.common.tables import terminal_columns

_OTHER_VERBS = {
    **dict.fromkeys(("ls", "ps", "status"), "list"),
    **dict.fromkeys(("show", "describe", "get", "dominfo"), "info"),
    **dict.fromkeys(("create", "new", "add"), "define"),
    **dict.fromkeys(("modify", "change", "update", "configure"), "set"),
    **dict.fromkeys(("delete", "remove", "rm"), "undefine"),
    **dict.fromkeys(("shutdown", "poweroff", "halt"), "stop"),
    **dict.fromkeys(("destroy", "kill"), "stop --force"),
    **dict.fromkeys(("restart", "reset"), "reboot"),
    "boot": "start",
}
"""Verbs of other tools, and what ``brine instance`` calls them."""
_UNKNOWN_VERB = re.compile(r"argument VERB: invalid choice: '([^']*)' \(choose from (.*)\)")
_PACKAGES = {
    "config": "brine-config",
    "uidpool": "brine-config",
    "kvmd": "brine-kvmd",
    "lock": "brine-cluster",
    "move": "brine-moves",
    "confd": "brine-confd",
    "nic": "brine-hotplug",
    "disk": "brine-hotplug",
    "tap": "brine-hotplug",
    "instance": "brine-instance",
    "lifecycle": "brine-lifecycle",
    "storage": "brine-storage",
    "watcher": "brine-watcher",
}
"""The package of each command, which may not be installed."""

_VERBS_ONLY = {
    "instance": "move virtual machines between nodes",
    "move": "the steps of a move between nodes, for programs",
    "node": "show what a node has and knows, and empty and fill it",
}
"""Summaries of commands that have other parts' verbs alone, such as a node's and the master's."""

_OTHER_NOUNS = {
    **_OTHER_VERBS,
    **dict.fromkeys(("vm", "vms", "instances", "domain", "guest"), ""),
    **{verb: verb for verb in ("list", "info", "define", "start", "stop", "reboot", "console")},
}


class Command(NamedTuple):
    """A command that a part adds to ``brine``, such as ``brine nic``.

    :param configure: adds the noun's arguments to its parser and sets the default ``run`` for each
        verb: ``module:function``, a function of the parsed arguments that returns the exit status.
        Only that module is imported, so that a verb loads what it needs and no more.
    """

    summary: str
    configure: Callable[[argparse.ArgumentParser], None]


def add_verb(
    verbs: Any, name: str, run: str, summary: str, *, description: str | None = None
) -> Parser:
    """Add a verb to a noun's sub-parsers, and return the verb's parser.

    :param run: ``module:function``.
    :param description: more than *summary*, for the verb's own ``--help``.
    """
    parser: Parser = verbs.add_parser(
        name, help=summary, description=description or summary, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


class _Verbs(argparse._SubParsersAction):  # type: ignore[type-arg]
    """The verbs of a noun. If the command line names a verb, only its parser is made: those of all
    take longer than everything else before the verb begins."""

    named: str | None = None

    def add_parser(self, name: str, **options: Any) -> Any:
        if self.named in (None, name):
            return super().add_parser(name, **options)
        self.choices[name] = other = _OtherVerb()
        return other


class _OtherVerb:
    """In the place of the parser of a verb that the command line does not name."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors look like all others of Brine's.

    With *takes_command*, all words after ``--`` are the attribute ``command`` of what it parses.
    The parser refuses an empty argument: verbs would take an empty one as not given. Types
    with their own rule decide themselves, and an argument of the type :class:`str` may be empty.

    :param verb: the verb that it is to parse, where that is known before.
    """

    takes_command = False

    def __init__(self, *, verb: str | None = None, **options: Any) -> None:
        super().__init__(**{"formatter_class": _formatter, **options})
        self._verb = verb
        self.verbs: Any = None  # of a noun

    def add_subparsers(self, **options: Any) -> Any:
        """As argparse has it, but that verbs may be left out."""
        verbs: Any = super().add_subparsers(**{"action": _Verbs, **options})
        verbs.named = self._verb
        self.verbs = verbs
        return verbs

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, which argparse itself can't divide at ``--``."""
        command: list[str] = []
        if self.takes_command and "--" in args:
            at = args.index("--")
            args, command = args[:at], args[at + 1 :]
        parsed, unknown = super().parse_known_args(args, namespace)
        if self.takes_command:
            parsed.command = command
            if unknown:
                self.error(f"unrecognized arguments: {' '.join(unknown)}; a command comes after --")
        return parsed, unknown

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """As argparse has it, for what the command line has, but not for defaults."""
        is_for_others = action.nargs in (argparse.PARSER, argparse.REMAINDER)
        is_lenient = action.type is None or action.default == ""
        if "" in arg_strings and is_lenient and action.type is not str and not is_for_others:
            raise argparse.ArgumentError(action, "can't be empty")
        return super()._get_values(action, arg_strings)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Leave; argparse has printed help, or a version, and does not see whether that worked."""
        try:
            if sys.stdout:
                sys.stdout.flush()
        except OSError as error:
            raise SystemExit(_output_lost(self.prog.split()[0], error)) from None
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        """Leave with status 2, one line and a hint."""
        hint = f"see {self.prog} --help"
        if self._subparsers and self._verb and message.startswith("unrecognized"):
            hint = f"see {self.prog} {self._verb} --help"
        if found := _UNKNOWN_VERB.search(message):
            said, known = found[1], re.findall(r"[\w-]+", found[2])
            other = _OTHER_VERBS.get(said, "")
            if other == "info" and other not in known:
                other = "list"
            message = f"there is no {self.prog} {said}"
            is_known = other.partition(" ")[0] in known
            hint = f"did you mean {other}?" if is_known else nearest(said, known)
        die(self.prog.split()[0], UsageError(message, hint=hint), 2)


def _formatter(prog: str) -> argparse.HelpFormatter:
    """The help formatter of :mod:`argparse`, with the terminal's width given: argparse would load
    compression and more to find the width."""
    return argparse.HelpFormatter(prog, width=(terminal_columns() or 80) - 2)


def main(arguments: Sequence[str] | None = None, *, ahead: Any = None) -> int:
    """Run ``brine`` and return its exit status: 0, 1 for a failure, 2 for a wrong command line.

    :param ahead: what was begun for the verb, which has it as ``arguments.ahead``.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if sys.stdin is None:  # closed before we started: else the first file that is opened is it
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale may lack characters of names, and names of files may have any bytes.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _run(arguments, ahead)
        if sys.stdout:  # None where it was closed before we started
            sys.stdout.flush()
        return status
    except BrineError as error:
        die("brine", error, 2 if isinstance(error, UsageError) else 1)
    except OSError as error:
        if error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
            die("brine", BrineError(text, hint=root_hint(error)), 1)
        return _output_lost("brine", error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _output_lost(program: str, error: OSError) -> int:
    """Report that output can't be written, unless its reader has closed it; return the status."""
    # The rest of the buffer would fail once more at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        die(program, BrineError(f"output can't be written: {error.strerror}"), 1)
    return 128 + signal.SIGPIPE


def _run(arguments: Sequence[str], ahead: Any) -> int:
    nouns = _nouns()
    noun = arguments[0] if arguments else "--help"
    if noun in ("-h", "--help"):
        print(_overview(nouns))
        return 0
    if noun == "--version":
        return _print_version(arguments[1:])
    if noun == "--complete":
        return _print_completions(arguments[1:], nouns)
    if noun not in nouns:
        if noun.startswith("-"):
            raise UsageError(f"there is no option {noun}", hint="see brine --help")
        raise UsageError(f"there is no command {noun}", hint=_hint(noun, nouns))
    command = nouns[noun]()
    verb = arguments[1] if len(arguments) > 1 and not arguments[1].startswith("-") else None
    parsed = parser_of(noun, command, verb).parse_args(arguments[1:])
    parsed.ahead = ahead
    return execute(parsed)


def _nouns() -> dict[str, Callable[[], Command]]:
    """The commands that installed parts have, each loaded when it is called."""
    found: dict[str, Callable[[], Command]] = {}
    for entry in entry_points("brine.commands"):
        found[entry.name] = entry.load
    for entry in entry_points("brine.verbs"):
        found.setdefault(entry.name, partial(verbs_only, entry.name))
    return found


def verbs_only(noun: str) -> Command:
    """A command whose verbs are all other parts'."""
    return Command(_VERBS_ONLY.get(noun, "what installed parts do"), _configure_by_others)


def parser_of(noun: str, command: Command, verb: str | None = None) -> Parser:
    """The parser of a command, with the verbs that other parts add to it.

    :param verb: the command line names this one, and its parser alone is made; None makes all.
    """
    parser = Parser(
        prog=f"brine {noun}", description=command.summary, allow_abbrev=False, verb=verb
    )
    command.configure(parser)
    for entry in entry_points("brine.verbs"):
        if entry.name == noun:
            entry.load()(parser.verbs)
    return parser


def _print_completions(words: Sequence[str], nouns: Mapping[str, Callable[[], Command]]) -> int:
    complete = EntryPoint("complete", "brine.common.completion:complete").load()  # for shells only

    def parser(noun: str, verb: str | None) -> Parser | None:
        return parser_of(noun, nouns[noun](), verb) if noun in nouns else None

    texts = ((name, nouns[name]().summary) for name in sorted(nouns))
    for line in complete(words, texts, parser):
        print(line)
    return 0


def _print_version(options: Sequence[str]) -> int:
    if options not in ([], ["--json"]):
        raise UsageError("--version has no other option than --json", hint="see brine --help")
    parts = installed_versions() if options else {}
    parts.pop("common", None)  # whose version it is
    print(
        json.dumps({"version": __version__, "parts": parts}) if options else f"brine {__version__}"
    )
    return 0


def execute(parsed: argparse.Namespace) -> int:
    """Run the function that a command line names, and return the exit status."""
    run = EntryPoint("run", parsed.run).load() if isinstance(parsed.run, str) else parsed.run
    status: int = run(parsed)
    return status


def _overview(nouns: Mapping[str, Callable[[], Command]]) -> str:
    lines = [
        "usage: brine COMMAND ...",
        "       brine --help | --version [--json]",
        "",
        "Looks after the virtual machines of KVM and Xen nodes.",
        "",
        "commands:",
    ]
    for name in sorted(nouns):
        try:
            summary = nouns[name]().summary
        except Exception as error:  # one part that does not load must not hide the others
            summary = f"(does not load: {error})"
        lines.append(f"  {name:<12} {summary}")
    if not nouns:
        lines.append("  none: install a part of Brine that has one, such as brine-kvmd")
    return "\n".join([*lines, "", "See brine COMMAND --help, and brine(1)."])


def _hint(noun: str, nouns: Collection[str]) -> str:
    if noun in _OTHER_NOUNS and "instance" in nouns:
        return f"brine instance {_OTHER_NOUNS[noun]}".strip()
    if noun in _PACKAGES:
        return f"install the package {_PACKAGES[noun]}"
    return nearest(noun, nouns) if nouns else "no part of Brine with commands is installed"


def undo_when_told_to_end() -> None:
    """Have the signals that end a process end it in order: what was begun is undone first."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # as nohup(1) has it
            signal.signal(each, end)


_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def seconds(text: str) -> float:
    """A type for how long to wait, in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        text = f"must be more than 0 and less than 1000000 seconds, but is {text!r}"
        raise ArgumentTypeError(text)
    return value


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """A type for whole numbers between two, both inclusive."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and low <= int(text[:9]) <= high):
            raise ArgumentTypeError(f"must be from {low} to {high}, but is {text!r}")
        return int(text)

    return parse


_SIZES = {name: 1 << 10 * power for power, name in enumerate("KMGT", 1)}


def size(text: str) -> int:
    """A type for sizes such as ``10G``, in bytes; ``GiB`` is the same."""
    match = re.fullmatch(r"([0-9]{1,9})(?:\.([0-9]{1,3}))?([KMGT])(?:iB)?", text)
    if match is None:
        raise ArgumentTypeError(f"must be a size such as 512M or 10G, but is {text!r:.60}")
    whole, part, unit = match.groups()
    found = int(float(f"{whole}.{part or 0}") * _SIZES[unit])
    if not found:
        raise ArgumentTypeError(f"must be more than 0, but is {text!r}")
    return found


def length_of_time(text: str) -> int | None:
    """The seconds of ``90s``, ``30m`` (or ``min``), ``2h``, ``3d`` or ``1w``; None of all else."""
    match = re.fullmatch(r"(\d{1,6})\s*([a-z]+)", text)
    if match is None or match[2] not in _UNITS_S:
        return None
    return int(match[1]) * _UNITS_S[match[2]]


def print_done(text: str, *, as_json: bool = False, **facts: Any) -> None:
    """Print what a command did, such as ``started: web1``; or, for programs, an object of *facts*
    and the **result**, which is the text's first word."""
    print(json.dumps({**facts, "result": text.partition(":")[0]}) if as_json else text)


def print_json(value: Any) -> None:
    """Print JSON for people and programs, with all characters that standard output can have."""
    encoding = str(getattr(sys.stdout, "encoding", None)).lower()
    print(json.dumps(value, indent=2, ensure_ascii=not encoding.startswith("utf")))


# The command that brine-common itself adds.


def _configure_outbox(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    text = "list the events that the cluster does not know, the oldest first"
    listing = add_verb(verbs, "list", "brine.common.outbox_commands:print_events", text)
    text = "remove events that the master has"
    acknowledge = add_verb(
        verbs, "acknowledge", "brine.common.outbox_commands:acknowledge_events", text
    )
    acknowledge.add_argument("id", metavar="ID", nargs="+")
    for each in (listing, acknowledge):
        each.add_argument("--json", action="store_true", help="print JSON, for programs")


OUTBOX = Command("tell the cluster what happened on this node", _configure_outbox)


def _configure_operations(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    text = "list work of several steps that is in progress, or was interrupted"
    listing = add_verb(verbs, "list", "brine.common.operation_commands:print_operations", text)
    text = "complete or undo interrupted work"
    settle = add_verb(verbs, "settle", "brine.common.operation_commands:settle_operations", text)
    settle.add_argument("id", metavar="ID", nargs="*", help="default: all")
    for each in (listing, settle):
        each.add_argument("--json", action="store_true", help="print JSON, for programs")


OPERATIONS = Command("show and settle work that was interrupted", _configure_operations)


def _configure_events(parser: argparse.ArgumentParser) -> None:
    commands = "brine.common.event_commands"
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    text = "list the programs in /etc/brine/events.d, and why some are not run"
    listing = add_verb(verbs, "list", f"{commands}:list_programs", text)
    listing.add_argument("--json", action="store_true", help="print JSON, for programs")
    text = "run programs as for an event"
    trial = add_verb(verbs, "test", f"{commands}:try_programs", text)
    trial.add_argument("program", metavar="PROGRAM", nargs="*", help="default: all")
    text = "follow the journal, and have programs run for events: what brine-events.service does"
    add_verb(verbs, "follow", "brine.common.event_follower:follow_journal", text)


EVENTS = Command("run programs of yours when an instance crashes or is given up", _configure_events)


def _configure_metrics(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run="brine.common.metrics_commands:print_metrics")
    text = (
        "put them where node_exporter's textfile collector reads them; see /etc/brine/metrics.toml"
    )
    parser.add_argument("--textfile", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


METRICS = Command("print the figures of this node, for Prometheus", _configure_metrics)


def _configure_by_others(parser: argparse.ArgumentParser) -> None:
    parser.add_subparsers(metavar="VERB", required=True)
