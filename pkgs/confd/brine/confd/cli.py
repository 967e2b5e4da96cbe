"""The command line of ``brine confd``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from brine.common import paths
from brine.common.cli import Command, add_verb, whole_number

_COMMANDS = "brine.confd.commands"
_LONGEST_S = 3600.0
_PING_TIMEOUT_S = 3.0
_QUERY_TIMEOUT_S = 10.0
EVERY_PEER = sys.maxsize
"""A coverage that leaves nobody out."""


def _coverage(text: str) -> int:
    if text == "all":
        return EVERY_PEER
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a number from 1, or all, but is {text!r}")
    return int(text)


def _timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds <= _LONGEST_S:  # also what is not a number
        message = f"must be seconds, more than 0 and up to {_LONGEST_S:g}, but is {text!r}"
        raise argparse.ArgumentTypeError(message)
    return seconds


def _add_options(parser: argparse.ArgumentParser, timeout_s: float) -> None:
    group = parser.add_argument_group("peers")
    group.add_argument(
        "--peer",
        action="append",
        metavar="ADDRESS",
        help="ask this peer, optionally with :PORT; may be repeated "
        "(default: the master candidates)",
    )
    group.add_argument(
        "--port", type=whole_number(1, 65535), metavar="N", help="port of peers; default: 1814"
    )
    group.add_argument(
        "--key", type=Path, metavar="FILE", help=f"the cluster's key; default: {paths.KEY_FILE}"
    )
    group.add_argument(
        "--timeout",
        type=_timeout,
        default=timeout_s,
        metavar="S",
        help=f"wait at most S seconds; default: {timeout_s:g}",
    )
    group.add_argument("--json", action="store_true", help="print a JSON object")


def _configure_query(parser: argparse.ArgumentParser) -> None:
    from brine.confd.kinds import FIELDS, KINDS  # brine --help has no need of these

    types = parser.add_subparsers(title="types", metavar="TYPE", required=True)
    for request_type, kind in KINDS.items():
        name = request_type.name.lower().replace("_", "-")
        one = add_verb(
            types, name, f"{_COMMANDS}:query", kind.help, description=f"Asks for {kind.help}."
        )
        one.set_defaults(type=request_type)
        if kind.argument:
            one.add_argument("argument", metavar=kind.argument, nargs="+" if kind.many else None)
        if "link" in kind.options:
            one.add_argument("--link", metavar="LINK", help="default: the cluster's default link")
        if "field" in kind.options:
            one.add_argument(
                "--field",
                action="append",
                choices=tuple(FIELDS),
                metavar="NAME",
                help=f"print this instead: {', '.join(FIELDS)}; may be repeated",
            )
        if "after" in kind.options:
            one.add_argument(
                "--after", metavar="NAME", help="a page of those that follow NAME; '' for the first"
            )
        one.add_argument(
            "--coverage",
            type=_coverage,
            metavar="N",
            help="ask N peers, or all, and wait for each; default: ask six, until enough answer",
        )
        _add_options(one, _QUERY_TIMEOUT_S)


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    query = verbs.add_parser(
        "query",
        help="query several master candidates, and print the newest answer",
        description="Asks several master candidates and prints the newest answer. "
        "See brine confd query TYPE --help for a type's options.",
        allow_abbrev=False,
    )
    _configure_query(query)
    ping = add_verb(
        verbs,
        "ping",
        f"{_COMMANDS}:ping",
        "show which daemons answer",
        description="Asks every master candidate whether its daemon answers.",
    )
    _add_options(ping, _PING_TIMEOUT_S)
    key = add_verb(
        verbs,
        "new-key",
        f"{_COMMANDS}:make_key",
        "make the cluster's key",
        description="Makes a new random key, once for a cluster; every node gets a copy.",
    )
    change = key.add_mutually_exclusive_group()
    change.add_argument(
        "--replace", action="store_true", help="replace a key, which stays valid as the previous"
    )
    change.add_argument(
        "--forget-old", action="store_true", help="remove the previous key, once no node needs it"
    )
    key.add_argument(
        "--key", type=Path, metavar="FILE", help=f"where it goes; default: {paths.KEY_FILE}"
    )


COMMAND = Command("ask the cluster's configuration daemons", _configure)
