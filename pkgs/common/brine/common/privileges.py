"""Dropping the capabilities of root that a command does not need
(:manpage:`capabilities(7)`)."""

from __future__ import annotations

import ctypes
import enum
import os
from ctypes import Array

from brine.common.errors import BrineError

_VERSION_3 = 0x20080522
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


class _Word(ctypes.Structure):
    """32 capabilities of each kind."""

    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def keep_only(*capabilities: Capability) -> None:
    """Give up all capabilities but these, for good. The process gains none that it lacks.

    A program that root starts from here has all capabilities again. Call this function before
    there are threads: each thread has capabilities of its own.
    """
    words = _capabilities()
    if not any(word.permitted for word in words):
        return
    kept = sum(1 << one for one in capabilities)
    for number, word in enumerate(words):
        word.effective &= kept >> (32 * number)
        word.permitted &= kept >> (32 * number)
        word.inheritable = 0
    _call("capset", words)


def keep_for_programs(*capabilities: Capability) -> None:
    """Let the programs that this process becomes or starts have no other capabilities than these,
    whichever user they run as."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(_HIGHEST + 1):
        # To ask for one that the kernel lacks fails.
        if number in capabilities or libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) != 1:
            continue
        if libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            reason = os.strerror(ctypes.get_errno())
            raise PrivilegeError(f"capability {number} can't be given up: {reason}")


def may(capability: Capability) -> bool:
    """Whether this thread has a capability."""
    number, bit = divmod(capability, 32)
    return bool(_capabilities()[number].effective >> bit & 1)


def _capabilities() -> Array[_Word]:
    words = (_Word * 2)()
    _call("capget", words)
    return words


def _call(name: str, words: Array[_Word]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)  # 0: this thread
    if getattr(libc, name)(header, words) != 0:
        done = "read" if name == "capget" else "given up"
        raise PrivilegeError(f"capabilities can't be {done}: {os.strerror(ctypes.get_errno())}")
