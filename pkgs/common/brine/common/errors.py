"""The root of all errors, and their messages for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NoReturn


class BrineError(Exception):
    """Something that Brine could not do, told so that its reader can act on it.

    The tree::

        BrineError
        +-- SettingsError      a settings file that can't be used
        +-- MemoryLockError    the kernel refused to lock our memory
        +-- PrivilegeError     the kernel refused to take privileges away
        +-- UsageError         a command line that asks for something that can't be
        +-- LockedError        a lock that somebody else holds
        +-- SsconfError        a value of ssconf that can't be used
        +-- UidPoolError       a pool of user ids that can't be used, or has none to give
        +-- SchemaError        data that is not what its schema says
        |   +-- ConfigError        a configuration that can't be used
        |       +-- NoConfigError      there is none here
        |       +-- CorruptError       the file is damaged
        |       +-- NotFoundError      an object that is not in it
        |       +-- AmbiguousError     a short name that several objects have
        |       +-- InputError         an input of `brine config apply` with mistakes
        +-- KeyFileError       a key of the cluster's that can't be used (brine.confd)
        +-- PortError          an address or port that can't be listened on (brine.confd)
        +-- WorkerError        worker processes that can't be had (brine.confd)
        +-- ConfdError         a question without an answer (brine.confd)
        +-- HotplugError       a device that could not be plugged or unplugged (brine.hotplug)
        |   +-- RefusedByGuestError    the guest keeps it
        +-- NoSlotError        no place left to plug a device into (brine.hotplug)
        +-- RuntimeFileError   a runtime file that can't be used (brine.hotplug)
        +-- TapError           a tap that could not be made, opened or removed (brine.hotplug)
        |   +-- TapExistsError, TapBusyError
        +-- LinkError          what the kernel refused of the network (brine.hotplug)
        |   +-- NoLinkError        there is no such interface
        +-- BridgeError, OpenVswitchError, ScriptError, RecordError    (brine.hotplug)
        +-- QmpError           talking to a QEMU monitor
            +-- QmpProtocolError   the peer does not speak QMP
            +-- QmpCommandError    QEMU refused a command
            +-- QmpTimeoutError    QEMU did not answer in time
            +-- QmpClosedError     the connection ended

    :param message: what went wrong, on what.
    :param hint: what to do about it, if there is something to do.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(BrineError):
    """A command line that asks for something that can't be."""


def die(program: str, error: BrineError, status: int) -> NoReturn:
    """Tell a person of an error, in one line and perhaps a hint, and leave with *status*."""
    tell_error(error, program=program)
    raise SystemExit(status)


def tell_error(error: BrineError, about: str = "", *, program: str = "brine") -> None:
    """Tell a person of one error among others.

    :param about: what it is about, where the error does not say that itself.
    """
    text = f"{about}: {error}" if about else str(error)
    _tell(program, "error", text, error.hint)


def warn(text: str, *, hint: str | None = None) -> None:
    """Tell a person of something that the command has not failed of."""
    _tell("brine", "warning", text, hint)


def _tell(program: str, kind: str, text: str, hint: str | None) -> None:
    print(f"{program}: {kind}: {text}", file=sys.stderr, flush=True)
    if hint:
        print(f"{program}: hint: {hint}", file=sys.stderr, flush=True)


# What somebody may have meant.


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown *word*: the known one that looks most like it, or all of them."""
    known = sorted(known)
    return closest(word, known) or f"known are: {', '.join(known)}"


def closest(word: str, known: Iterable[str]) -> str | None:
    """A hint for an unknown *word*: the known one that looks most like it, if one does."""
    from difflib import get_close_matches  # only a mistake takes it

    close = get_close_matches(word, sorted(known), n=1)
    return f"did you mean {close[0]}?" if close else None


# Names of files, VMs and the like, which may have any bytes, in a line of text.


def printable(name: str) -> str:
    """*name* fit for one line of text: odd bytes and control characters become escapes."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
