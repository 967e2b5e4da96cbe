"""Dropping the capabilities of root that a command does not need
(:manpage:`capabilities(7)`)."""

from __future__ import annotations

import ctypes
import enum
import os
from ctypes import Array

from brine.common.errors import BrineError

_VERSION_3 = 0x20080522
_WORDS = 2  # of 32 bits each
_HIGHEST = 63
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24


class Capability(enum.IntEnum):
    """The capabilities that some part of Brine needs, with the kernel's numbers."""

    CHOWN = 0
    DAC_OVERRIDE = 1
    FOWNER = 3
    KILL = 5
    SETGID = 6
    SETUID = 7
    SETPCAP = 8
    NET_ADMIN = 12
    IPC_LOCK = 14
    SYS_CHROOT = 18
    SYS_PTRACE = 19
    SYS_ADMIN = 21
    SYS_RESOURCE = 24


class PrivilegeError(BrineError):
    """The kernel refused to take privileges away."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Word(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def keep_only(*capabilities: Capability) -> None:
    """Give up all capabilities but these, for good. The process gains none that it lacks.

    A program that root starts from here has all capabilities again. Call this function before
    there are threads: each thread has capabilities of its own.

    :raises PrivilegeError: if the kernel refuses.
    """
    words = _capabilities()
    if not any(word.permitted for word in words):
        return
    for number, word in enumerate(words):
        low = 32 * number
        kept = sum(1 << (one - low) for one in capabilities if low <= one < low + 32)
        word.effective &= kept
        word.permitted &= kept
        word.inheritable = 0
    _call("capset", words)


def keep_for_programs(*capabilities: Capability) -> None:
    """Let the programs that this process becomes or starts have no other capabilities than these,
    whichever user they run as.

    :raises PrivilegeError: if the kernel refuses.
    """
    for number in range(_HIGHEST + 1):
        if number not in capabilities and _prctl(_PR_CAPBSET_READ, number) == 1:
            _prctl(_PR_CAPBSET_DROP, number)


def may(capability: Capability) -> bool:
    """Whether this thread has a capability.

    :raises PrivilegeError: if the kernel does not say.
    """
    number, bit = divmod(capability, 32)
    return bool(_capabilities()[number].effective >> bit & 1)


def _prctl(option: int, number: int) -> int:
    """What :manpage:`prctl(2)` says; READ of a capability that the kernel lacks fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    done: int = libc.prctl(option, number, 0, 0, 0)
    if done < 0 and option == _PR_CAPBSET_DROP:
        text = f"capability {number} can't be given up: {os.strerror(ctypes.get_errno())}"
        raise PrivilegeError(text)
    return done


def _capabilities() -> Array[_Word]:
    words = (_Word * _WORDS)()
    _call("capget", words)
    return words


def _call(name: str, words: Array[_Word]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(ctypes.byref(_Header(_VERSION_3, 0)), words) != 0:
        done = "read" if name == "capget" else "given up"
        raise PrivilegeError(f"capabilities can't be {done}: {os.strerror(ctypes.get_errno())}")
