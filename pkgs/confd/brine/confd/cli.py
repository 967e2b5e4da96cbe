"""The command line of ``brine confd``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from brine.common import paths
from brine.common.cli import Command, add_verb, seconds, whole_number
from brine.confd.questions import FIELDS, QUERY_COMMANDS

_COMMANDS = "brine.confd.commands"
EVERY_PEER = sys.maxsize
"""A coverage that includes every candidate."""


def _coverage(text: str) -> int:
    return EVERY_PEER if text == "all" else whole_number(1, 10**9 - 1)(text)


def _add_options(parser: argparse.ArgumentParser, timeout_s: float) -> None:
    add = parser.add_argument_group("peers").add_argument
    help_ = "ask this peer, optionally with :PORT; may be repeated (default: the master candidates)"
    add("--peer", action="append", metavar="ADDRESS", help=help_)
    number = whole_number(1, 65535)
    add("--port", type=number, metavar="N", help="port of peers; default: 1814")
    help_ = f"the cluster's key; default: {paths.KEY_FILE}"
    add("--key", type=Path, metavar="FILE", help=help_)
    help_ = f"wait at most S seconds; default: {timeout_s:g}"
    add("--timeout", type=seconds, default=timeout_s, metavar="S", help=help_)
    add("--json", action="store_true", help="print a JSON object")


def _configure_query(parser: argparse.ArgumentParser) -> None:
    types = parser.add_subparsers(title="types", metavar="TYPE", required=True)
    for request_type, command in QUERY_COMMANDS.items():
        name = request_type.name.lower().replace("_", "-")
        description = f"Asks for {command.help}."
        one = add_verb(types, name, f"{_COMMANDS}:query", command.help, description=description)
        one.set_defaults(type=request_type)
        if command.argument:
            count = "+" if command.argument == "IP" else None
            one.add_argument("argument", metavar=command.argument, nargs=count, type=str)
        if "link" in command.options:
            one.add_argument("--link", metavar="LINK", help="default: the cluster's default link")
        if "field" in command.options:
            help_ = f"print this instead: {', '.join(FIELDS)}; may be repeated"
            one.add_argument("--field", action="append", choices=FIELDS, metavar="NAME", help=help_)
        if "after" in command.options:
            help_ = "a page of those that follow NAME; '' for the first"
            one.add_argument("--after", type=str, metavar="NAME", help=help_)
        help_ = "ask N peers, or all, and wait for each; default: ask six, until enough answer"
        one.add_argument("--coverage", type=_coverage, metavar="N", help=help_)
        _add_options(one, 10.0)


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    summary = "query several master candidates, and print the newest answer"
    description = (
        "Asks several master candidates and prints the newest answer. "
        "See brine confd query TYPE --help for a type's options."
    )
    query = verbs.add_parser("query", help=summary, description=description, allow_abbrev=False)
    _configure_query(query)
    description = "Asks every master candidate whether its daemon answers."
    run = f"{_COMMANDS}:ping"
    ping = add_verb(verbs, "ping", run, "show which daemons answer", description=description)
    _add_options(ping, 3.0)
    description = "Makes a new random key, once for a cluster; every node gets a copy."
    run = f"{_COMMANDS}:make_key"
    key = add_verb(verbs, "new-key", run, "make the cluster's key", description=description)
    change = key.add_mutually_exclusive_group()
    help_ = "replace a key, which stays valid as the previous"
    change.add_argument("--replace", action="store_true", help=help_)
    help_ = "remove the previous key, once no node needs it"
    change.add_argument("--forget-old", action="store_true", help=help_)
    help_ = f"where it goes; default: {paths.KEY_FILE}"
    key.add_argument("--key", type=Path, metavar="FILE", help=help_)
    description = "Says whether a file can be the cluster's key, and changes nothing."
    run = f"{_COMMANDS}:check_key"
    check = add_verb(verbs, "check-key", run, "check a key", description=description)
    check.add_argument("file", type=Path, metavar="FILE", help="the key")
    check.add_argument("--json", action="store_true", help="print a JSON object")


COMMAND = Command("ask the cluster's configuration daemons", _configure)
