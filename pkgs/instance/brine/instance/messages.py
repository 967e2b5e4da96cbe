"""The journal's records about instances; brine-instance.catalog explains each kind.

They have the fields ``BRINE_INSTANCE=``, ``BRINE_EVENT=`` and, as far as they are known,
``BRINE_BY=`` (the user), ``BRINE_HOW=``, ``BRINE_REASON=``, ``BRINE_PID=``, ``BRINE_TIMEOUT=``
(seconds), ``BRINE_SIGNAL=``, ``BRINE_KEYS=`` (of a spec), ``BRINE_NAME=``, ``BRINE_FILE=``,
``BRINE_UID=``, ``BRINE_DOMAIN=`` (Xen's number), ``BRINE_NODE=`` and ``BRINE_SERIAL=`` (of a
claim). Without a journal they are dropped.
"""

from __future__ import annotations

import functools
import os
import pwd
from typing import TYPE_CHECKING

from brine.common.errors import printable, tell_by
from brine.common.files import text_of
from brine.common.message import ERROR, INFO, NOTICE, WARNING, Message
from brine.vm.unit_name import unit_of

if TYPE_CHECKING:
    import logging


def _message(id: str, event: str, text: str, level: int = NOTICE) -> Message:
    return Message(id, event, level, text)


START_ASKED = _message("6f372cf1b5cf450ab80a8a17bafbfdfe", "start-asked", "{by} wants it to start")
STARTED = _message("c1c569cdb3fc44ab834e9c02fccbe948", "started", "has started, as process {pid}")
AWAITS = _message(
    "fe3f7f8f1d5c4c0d9d2b7be1c6a0a9d4",
    "awaits-guest",
    "waits for its guest, which comes from {node}, as process {pid}",
)
NOT_STARTED = _message(
    "528e9489757d4536b1c198cc3dee24f0", "start-failed", "did not start: {reason}", ERROR
)
CALLED_OFF = _message(
    "aa7fad47f5994265aae911510bfc7f23",
    "start-called-off",
    "its start was called off before it had begun: it counts as stopped",
)
STOP_ASKED = _message(
    "96e6e32c2bd8456eaaffd11a854d243c",
    "stop-asked",
    "{by} wants it to stop: {how}, within {timeout} s",
)
NOT_IN_TIME = _message(
    "4bb86275987649e7bc73f9db43f742a2",
    "not-in-time",
    "did not shut down within {timeout} s, and runs on",
    WARNING,
)
ENDED = _message(
    "c7a00c88f05245108f81f4f55f2ccaac",
    "ended",
    "did not shut down within {timeout} s, and was ended by {signal}",
    WARNING,
)
REBOOTED = _message("595e233cb82342e6b893be108dccacf7", "rebooted", "was rebooted for {by}")
PAUSED = _message("b09a6cb7e06a4cdd92f7176ae293dba2", "paused", "{by} has paused it")
RESUMED = _message("c747210aa72e4a1f97bf964dc2d9dff4", "resumed", "{by} has resumed it")
RESET = _message("38b344c43daa41f685509a0ab0ef0852", "reset", "{by} has pressed its reset button")
DEFINED = _message("9d784e763b4e4a84a41257b4026bfefa", "defined", "{by} has defined it")
CHANGED = _message(
    "3c8d3dd9edb747da870760974a15469f", "changed", "{by} has changed its spec: {keys}"
)
UNDEFINED = _message("d409806a35ca40db8a75646f008127af", "undefined", "{by} has undefined it")
RENAMED = _message("b6735e51ae1e4e019ac0bb25d4159f52", "renamed", "{by} has renamed it from {name}")
CLONED = _message(
    "0496e86615284712b7edeb38024c51ea", "cloned", "{by} has made it as a clone of {name}"
)
DISK_MOVED = _message(
    "18f76123b05b4e92b29d096e85ecdb55", "disk-moved", "{by} has moved its disk {how}"
)
MEDIUM_CHANGED = _message(
    "ffb14f25f85443a5aaf85bb316ec6453", "medium-changed", "{by} has changed a medium: {how}"
)
HOT_CHANGES = _message(
    "f8eed1656f674a04b90152e98e67be1f",
    "hot-changes-kept",
    "its spec has what was plugged while it ran: {how}",
)
RUNTIME_ASIDE = _message(
    "a8d6cd67e61a4a8fbadd30a0ec46b60e",
    "runtime-aside",
    "its runtime file is kept as {file}, and not used: {reason}",
    WARNING,
)
DOMAIN_LEFT = _message(
    "eeb3a6e1c5fd4c0f9c5e2a0d6f7f0d11",
    "domain-left",
    "has ended, and its domain {domain} is left: {reason}",
)
DOMAIN_LIVES = _message(
    "3f0c27ac0e5b4b1ab2c1f7f7d2b86a52",
    "domain-lives",
    "has lost its xl, and its domain {domain} runs on",
    WARNING,
)
DOMAIN_SUSPENDED = _message(
    "d94ee16eaefb4cd5882d4ab059943865",
    "domain-suspended",
    "is suspended, to be saved or moved, as domain {domain}: it counts as stopped",
)
GIVEN_AWAY = _message(
    "081b888e649a4eb0b19a9eaad416dc35",
    "given-away",
    "is {node}'s from now on, by serial {serial} of the configuration",
)
TAKEN = _message(
    "6b0a23538bdc4009a18d66d979375b5b",
    "taken",
    "is this node's from now on, by serial {serial} of the configuration, and was {node}'s",
)
SET_ASIDE = _message(
    "60a2ce0dac93487f9eb12df370653de2",
    "set-aside",
    "is {node}'s, by serial {serial} of the configuration: it is set aside, and not started here",
    WARNING,
)
CLAIM_FORGOTTEN = _message(
    "3b2570479dba495a9aa2aeb65c31e784",
    "claim-forgotten",
    "{by} has had this node forget its claim",
)
UID_GIVEN = _message(
    "43d17cf2f87b4953b1069bd4b1fcecaa", "uid-given", "has the user id {uid} of the pool", INFO
)
UID_RETURNED = _message(
    "a470c8c7b8a9415e8c103a01b28f5dde",
    "uid-returned",
    "has given the user id {uid} back to the pool",
    INFO,
)

_NOBODY = "4294967295"  # the login uid of what no login has started

_identifier = ""


def log_to_journal(identifier: str, *, at_once: bool = False) -> None:
    """Send this process's records about instances to the journal, if there is one.

    :param identifier: the program's name in the journal.
    :param at_once: load what that takes now, and not when there is something to say.
    """
    global _identifier
    _identifier = identifier
    _log.cache_clear()
    if at_once:
        _log()


def tell_people_in_journal(identifier: str) -> None:
    """Have this process tell its errors and warnings by records of its own, with their priority.
    For a program that an instance's unit runs: what stands on stderr, of which the journal gets
    each line, is then QEMU's alone, and no line of QEMU's can be taken for Brine's.

    :param identifier: the program's name in the journal.
    """

    def teller(program: str, kind: str, text: str, hint: str | None) -> None:
        from brine.common.journal import send_line  # most have nothing to tell

        del program  # the identifier names it
        send_line(identifier, f"{kind}: {text}", ERROR if kind == "error" else WARNING)
        if hint:
            send_line(identifier, f"hint: {hint}", NOTICE)

    tell_by(teller)


def who_asks() -> str:
    """The user who runs this process, or else its unit."""
    if user := os.environ.get("SUDO_USER"):
        return printable(user)
    login = text_of("/proc/self/loginuid")
    uid = int(login) if login.isdecimal() and login != _NOBODY else os.getuid()
    unit = os.path.basename(text_of("/proc/self/cgroup").rpartition("::")[2])
    if login in ("", _NOBODY) and unit.endswith((".service", ".scope")):
        return unit
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def tell(message: Message, instance: str, **fields: object) -> None:
    """Send a record about an instance to the journal.

    :param fields: the fields in braces of the message's text; ``by`` defaults to this process's
        user.
    """
    from brine.common import journal  # takes long to load, and a start may have little to say

    if "{by}" in message.text:
        fields.setdefault("by", who_asks())
    said = {
        key: f"{value:g}" if isinstance(value, float) else str(value)
        for key, value in fields.items()
    }
    named = {f"BRINE_{key.upper()}": value for key, value in said.items()}
    named["OBJECT_SYSTEMD_UNIT"] = unit_of(instance)  # so that journalctl -u shows it
    journal.tell(_log(), message, message.text.format(**said), instance=instance, **named)


@functools.cache
def _log() -> logging.Logger:
    import logging

    from brine.common.journal import SOCKET, JournalHandler

    log = logging.getLogger(__name__)
    if _identifier:
        log.setLevel(INFO)
        handler = JournalHandler(_identifier) if SOCKET.exists() else logging.NullHandler()
        log.handlers[:] = [handler]
    return log
