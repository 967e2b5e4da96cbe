"""The root of all errors, and their messages for people."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn


class BrineError(Exception):
    """Something that Brine could not do, told so that its reader can act on it.

    The tree, without the errors that a part raises and handles by itself::

        BrineError
        +-- UsageError         a command line that asks for something that can't be
        +-- SettingsError      a settings file that can't be used
        +-- SchemaError        data that is not what its schema says
        |   +-- ConfigError        a configuration, and SpecError, a spec, that can't be used
        +-- LockError          a lock that can't be had, and LockedError, which others hold
        +-- OutboxError, UidPoolError, MemoryLockError, PrivilegeError, SsconfError
        +-- KeyFileError, PortError, WorkerError, ConfdError                 (brine.confd)
        +-- NoSlotError, RuntimeFileError, ConflictError                     (brine.vm)
        +-- HotplugError                                                     (brine.hotplug)
        +-- TapError, LinkError, OpenVswitchError, ScriptError, RecordError  (brine.hotplug.net)
        +-- MoveError, MoveKeyError                                          (brine.moves)
        +-- InstanceError      an instance that can't be worked on (brine.instance)
        +-- QmpError           talking to a QEMU monitor
            +-- QmpProtocolError   the peer does not speak QMP
            +-- QmpCommandError    QEMU refused a command
            +-- QmpTimeoutError    QEMU did not answer in time
            +-- QmpClosedError     the connection ended
            +-- StrangerError      another process than QEMU listens

    Both texts are fit for a terminal, as they may quote untrusted text; see :func:`shown_text`.

    :param message: what went wrong, on what.
    :param hint: what to do about it, if there is something to do.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(shown_text(message))
        self.hint = hint if hint is None else shown_text(hint)


DATA_FAULTS = (BrineError, LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What reading the data of another node may raise, where it is not what it should be."""


class UsageError(BrineError):
    """A command line that asks for something that can't be."""


Teller = Callable[[str, str, str, str | None], None]
"""Tells people something: the program, the kind (``error`` or ``warning``), the text and a hint."""

_tellers: list[Teller] = []


def tell_by(teller: Teller) -> None:
    """Have errors and warnings told in another way than on stderr.

    :param teller: raises an OSError where it can't; the warnings then go to stderr.
    """
    _tellers[:] = [teller]


def die(program: str, error: BrineError, status: int) -> NoReturn:
    """Tell a person of an error, in one line and perhaps a hint, and leave with *status*."""
    tell_error(error, program=program)
    raise SystemExit(status)


def tell_error(error: BrineError, about: str = "", *, program: str = "brine") -> None:
    """Tell a person of one error among several; *about* names a subject that it does not name."""
    _tell(program, "error", f"{about}: {error}" if about else str(error), error.hint)


def warn(text: str, *, hint: str | None = None, program: str = "brine") -> None:
    """Tell a person of something that the command has not failed of."""
    _tell(program, "warning", text, hint)


def _tell(program: str, kind: str, text: str, hint: str | None) -> None:
    text, hint = shown_text(text), shown_text(hint) if hint else None
    for teller in _tellers:
        with contextlib.suppress(OSError):
            teller(program, kind, text, hint)
            return
    print(f"{program}: {kind}: {text}", file=sys.stderr, flush=True)
    if hint:
        print(f"{program}: hint: {hint}", file=sys.stderr, flush=True)


def install_hint(*, apt: str, dnf: str, root: str = "") -> str:
    """A hint to install a package of the distribution, by its name for apt and its name for dnf.

    A node may have both commands: Debian has a package of dnf. The one that counts has installed
    Brine itself, of which dpkg then has a record.
    """
    is_of_dpkg = os.path.exists(f"{root}/var/lib/dpkg/info/brine-common.list")
    has_dnf = os.path.exists(f"{root}/usr/bin/dnf")
    return f"dnf install {dnf}" if has_dnf and not is_of_dpkg else f"apt install {apt}"


def root_hint(error: OSError) -> str | None:
    """A hint for a user without a permission; None if root could not do it, either."""
    return "be root" if isinstance(error, PermissionError) and os.geteuid() else None


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown *word*: the known one that looks most like it, or all of them."""
    known = sorted(known)
    return closest(word, known) or f"known are: {', '.join(known)}"


def closest(word: str, known: Iterable[str]) -> str | None:
    """A hint for an unknown *word*: the known one that looks most like it, if one does."""
    from difflib import get_close_matches  # only a mistake takes it

    close = get_close_matches(word, sorted(known), n=1)
    return f"did you mean {close[0]}?" if close else None


_FURTHER = "\n  "


def shown_text(text: str) -> str:
    """A message, fit for a terminal. Further lines are indented, so none of them looks like a
    message of its own; all other control characters become escapes."""
    return text if text.isprintable() else _FURTHER.join(map(printable, text.split(_FURTHER)))


def printable(name: str) -> str:
    """The name of a file or VM, fit for one line of text: odd bytes and control characters become
    escapes."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
