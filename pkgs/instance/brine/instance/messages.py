"""The journal's records about instances; brine-instance.catalog explains each kind.

They have the fields ``BRINE_INSTANCE=``, ``BRINE_EVENT=`` and, as far as it is known, ``BRINE_BY=``
(who asked for it), ``BRINE_HOW=``, ``BRINE_REASON=``, ``BRINE_PID=``, ``BRINE_TIMEOUT=`` (seconds),
``BRINE_SIGNAL=``, ``BRINE_KEYS=`` (of a spec), ``BRINE_NAME=``, ``BRINE_FILE=``, ``BRINE_UID=`` and
``BRINE_DOMAIN=`` (Xen's number).
Where there is no journal they go nowhere.
"""

from __future__ import annotations

import functools
import os
import pwd
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from brine.common.errors import printable
from brine.common.message import ERROR, INFO, NOTICE, WARNING, Message
from brine.common.peer import unit_of

if TYPE_CHECKING:
    import logging

START_ASKED = Message("6f372cf1b5cf450ab80a8a17bafbfdfe", "start-asked", NOTICE)
STARTED = Message("c1c569cdb3fc44ab834e9c02fccbe948", "started", NOTICE)
NOT_STARTED = Message("528e9489757d4536b1c198cc3dee24f0", "start-failed", ERROR)
STOP_ASKED = Message("96e6e32c2bd8456eaaffd11a854d243c", "stop-asked", NOTICE)
NOT_IN_TIME = Message("4bb86275987649e7bc73f9db43f742a2", "not-in-time", WARNING)
ENDED = Message("c7a00c88f05245108f81f4f55f2ccaac", "ended", WARNING)
REBOOTED = Message("595e233cb82342e6b893be108dccacf7", "rebooted", NOTICE)
PAUSED = Message("b09a6cb7e06a4cdd92f7176ae293dba2", "paused", NOTICE)
RESUMED = Message("c747210aa72e4a1f97bf964dc2d9dff4", "resumed", NOTICE)
RESET = Message("38b344c43daa41f685509a0ab0ef0852", "reset", NOTICE)
DEFINED = Message("9d784e763b4e4a84a41257b4026bfefa", "defined", NOTICE)
CHANGED = Message("3c8d3dd9edb747da870760974a15469f", "changed", NOTICE)
UNDEFINED = Message("d409806a35ca40db8a75646f008127af", "undefined", NOTICE)
RENAMED = Message("b6735e51ae1e4e019ac0bb25d4159f52", "renamed", NOTICE)
CLONED = Message("0496e86615284712b7edeb38024c51ea", "cloned", NOTICE)
MEDIUM_CHANGED = Message("ffb14f25f85443a5aaf85bb316ec6453", "medium-changed", NOTICE)
HOT_CHANGES = Message("f8eed1656f674a04b90152e98e67be1f", "hot-changes-kept", NOTICE)
RUNTIME_ASIDE = Message("a8d6cd67e61a4a8fbadd30a0ec46b60e", "runtime-aside", WARNING)
DOMAIN_LEFT = Message("eeb3a6e1c5fd4c0f9c5e2a0d6f7f0d11", "domain-left", NOTICE)
DOMAIN_LIVES = Message("3f0c27ac0e5b4b1ab2c1f7f7d2b86a52", "domain-lives", WARNING)
DOMAIN_SUSPENDED = Message("d94ee16eaefb4cd5882d4ab059943865", "domain-suspended", NOTICE)
UID_GIVEN = Message("43d17cf2f87b4953b1069bd4b1fcecaa", "uid-given", INFO)
UID_RETURNED = Message("a470c8c7b8a9415e8c103a01b28f5dde", "uid-returned", INFO)

_NOBODY = "4294967295"  # the login uid of what no login has started
_UNIT_SUFFIXES = (".service", ".scope")

_identifier = ""


def log_to_journal(identifier: str) -> None:
    """Send this process's records about instances to the journal, if there is one.

    :param identifier: of the program, as the journal shows it.
    """
    global _identifier
    _identifier = identifier
    _log.cache_clear()


def who_asks() -> str:
    """Who has this process do what it does: a person's user name, else the unit that it is of."""
    if user := os.environ.get("SUDO_USER"):
        return printable(user)
    login = _text("/proc/self/loginuid")
    if login.isdecimal() and login != _NOBODY:
        return _user(int(login))
    unit = os.path.basename(_text("/proc/self/cgroup").rpartition("::")[2])
    return unit if unit.endswith(_UNIT_SUFFIXES) else _user(os.getuid())


def tell_start_asked(instance: str, by: str) -> None:
    """Somebody wants an instance to be started.

    :param by: who, or what.
    """
    _tell(START_ASKED, instance, f"{by} wants it to start", by=by)


def tell_started(instance: str, pid: int) -> None:
    """An instance has started.

    :param pid: QEMU's process.
    """
    _tell(STARTED, instance, f"has started, as process {pid}", pid=str(pid))


def tell_not_started(instance: str, reason: str) -> None:
    """An instance did not start, or QEMU ended before it answered."""
    _tell(NOT_STARTED, instance, f"did not start: {reason}", reason=reason)


def tell_stop_asked(instance: str, by: str, how: str, timeout_s: float) -> None:
    """An instance is being stopped on the admin's behalf.

    :param how: in words.
    :param timeout_s: how long its guest may take.
    """
    text = f"{by} wants it to stop: {how}, within {timeout_s:g} s"
    _tell(STOP_ASKED, instance, text, by=by, how=how, timeout=f"{timeout_s:g}")


def tell_not_in_time(instance: str, timeout_s: float) -> None:
    """A guest did not shut down in time, and nobody wants it to be ended: it runs on."""
    text = f"did not shut down within {timeout_s:g} s, and runs on"
    _tell(NOT_IN_TIME, instance, text, timeout=f"{timeout_s:g}")


def tell_ended(instance: str, timeout_s: float, signal: str) -> None:
    """A guest did not shut down in time, and QEMU was ended.

    :param signal: by which, such as ``SIGTERM``.
    """
    text = f"did not shut down within {timeout_s:g} s, and was ended by {signal}"
    _tell(ENDED, instance, text, timeout=f"{timeout_s:g}", signal=signal)


def tell_rebooted(instance: str, by: str) -> None:
    """A guest was shut down, and the instance started anew."""
    _tell(REBOOTED, instance, f"was rebooted for {by}", by=by)


def tell_reset(instance: str, by: str) -> None:
    """An instance's reset button was pressed."""
    _tell(RESET, instance, f"{by} has pressed its reset button", by=by)


def tell_paused(instance: str, by: str) -> None:
    """An instance's processors stand still."""
    _tell(PAUSED, instance, f"{by} has paused it", by=by)


def tell_resumed(instance: str, by: str) -> None:
    """They go on."""
    _tell(RESUMED, instance, f"{by} has resumed it", by=by)


def tell_defined(instance: str, by: str) -> None:
    """There is a new instance."""
    _tell(DEFINED, instance, f"{by} has defined it", by=by)


def tell_changed(instance: str, by: str, keys: Iterable[str]) -> None:
    """The spec of an instance is another one.

    :param keys: what of it.
    """
    listed = " ".join(keys)
    _tell(CHANGED, instance, f"{by} has changed its spec: {listed}", by=by, keys=listed)


def tell_undefined(instance: str, by: str) -> None:
    """An instance is no more."""
    _tell(UNDEFINED, instance, f"{by} has undefined it", by=by)


def tell_renamed(instance: str, by: str, old_name: str) -> None:
    """An instance has another name."""
    _tell(RENAMED, instance, f"{by} has renamed it from {old_name}", by=by, name=old_name)


def tell_cloned(instance: str, by: str, source: str) -> None:
    """An instance was made as another one is."""
    _tell(CLONED, instance, f"{by} has made it as a clone of {source}", by=by, name=source)


def tell_medium_changed(instance: str, by: str, how: str) -> None:
    """What is in a CD-ROM drive is another medium, or none.

    :param how: in words.
    """
    _tell(MEDIUM_CHANGED, instance, f"{by} has changed a medium: {how}", by=by, how=how)


def tell_hot_changes(instance: str, what: Iterable[str]) -> None:
    """What was plugged into an instance, and what was taken out, is in its spec from now on.

    :param what: in words, each a device.
    """
    how = ", ".join(what)
    _tell(HOT_CHANGES, instance, f"its spec has what was plugged while it ran: {how}", how=how)


def tell_runtime_aside(instance: str, file: Path, reason: str) -> None:
    """A runtime file could not be used, and an instance starts without it.

    :param file: as it is kept.
    """
    text = f"its runtime file is kept as {file}, and not used: {reason}"
    _tell(RUNTIME_ASIDE, instance, text, file=str(file), reason=reason)


def tell_domain_left(instance: str, number: int, how: str) -> None:
    """A domain has ended. It stays, with its memory, until somebody cleans up.

    :param number: Xen's, of the domain.
    :param how: it ended, in words.
    """
    text = f"has ended, and its domain {number} is left: {how}"
    _tell(DOMAIN_LEFT, instance, text, reason=how, domain=str(number))


def tell_domain_lives(instance: str, number: int) -> None:
    """The xl that waits for the end of a domain was ended, and the domain was not.

    :param number: Xen's, of the domain.
    """
    text = f"has lost its xl, and its domain {number} runs on"
    _tell(DOMAIN_LIVES, instance, text, domain=str(number))


def tell_domain_suspended(instance: str, number: int) -> None:
    """A domain was suspended by whoever saves or moves it, which has ended its xl.

    :param number: Xen's, of the domain.
    """
    text = f"is suspended, to be saved or moved, as domain {number}: it counts as stopped"
    _tell(DOMAIN_SUSPENDED, instance, text, domain=str(number))


def tell_uid_given(instance: str, uid: int) -> None:
    """An instance has a user id of the pool."""
    _tell(UID_GIVEN, instance, f"has the user id {uid} of the pool", uid=str(uid))


def tell_uid_returned(instance: str, uid: int) -> None:
    """The pool has a user id back."""
    _tell(UID_RETURNED, instance, f"has given the user id {uid} back to the pool", uid=str(uid))


def _tell(message: Message, instance: str, text: str, **fields: str) -> None:
    from brine.common.journal import tell  # takes long to load, and a start may have little to say

    named = {f"BRINE_{key.upper()}": value for key, value in fields.items()}
    named["OBJECT_SYSTEMD_UNIT"] = unit_of(instance)  # journalctl -u shows it, whoever says it
    tell(_log(), message, text, instance=instance, **named)


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


def _text(file: str) -> str:
    try:
        return Path(file).read_text(errors="replace").strip()
    except OSError:
        return ""


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
