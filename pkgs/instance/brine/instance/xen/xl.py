"""Xen's command xl: listing domains, and changing them. Source: :manpage:`xl(1)`.

A domain has another number after each start, and may have any name. So a command finds the domain
by its UUID first, and then uses its number.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, NoReturn

from brine.common.errors import BrineError, install_hint, printable
from brine.common.files import text_of
from brine.common.process import run_bounded
from brine.vm.end import DomainEnd

PROGRAM = "xl"

FLAGS = "rbpscd"
"""A domain's state in letters: running, blocked, paused, shut down, crashed, dying."""

# In the fifth place there may be the reason: reboot, suspend, crash, watchdog, or another.
_STATE = re.compile(r"[-r][-b][-p][-s][-rscw?][-d]")
_ROW = re.compile(
    r"(?P<name>\S.*?)\s+(?P<id>\d+)\s+(?P<memory>\d+)\s+(?P<vcpus>\d+)\s+(?P<state>\S+)"
    r"\s+(?P<time>\d+(?:\.\d+)?)(?:\s+(?P<uuid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
    r"\s+(?P<reason>[0-9a-f]+|-)(?:\s.*)?)?\s*"
)
_HEADING = re.compile(r"Name\s+ID\s")
_NO_NAME = "(null)"
_NO_REASON = 0xFFFFFFFF
_INFO_ROW = re.compile(r"^(\w+) *: (.*)$", re.MULTILINE)
_HYPERVISOR = Path("/sys/hypervisor/type")
_DOM0 = 0
_TIMEOUT_S = 30.0
_DESTROY_TIMEOUT_S = 120.0  # its devices are taken back, by scripts


class XlError(BrineError):
    """Xen could not be asked, or refused."""


class XenMemory(NamedTuple):
    """The memory of Xen's, in MiB: all, and what new domains can get."""

    total_mib: int
    free_mib: int


class ShutdownReason(IntEnum):
    """Why a domain has shut down."""

    POWEROFF = 0
    REBOOT = 1
    SUSPEND = 2
    CRASH = 3
    WATCHDOG = 4
    SOFT_RESET = 5


_CRASHES = (ShutdownReason.CRASH, ShutdownReason.WATCHDOG)
_SUSPENDED = (ShutdownReason.SUSPEND, ShutdownReason.SOFT_RESET)
_OVER = (ShutdownReason.POWEROFF, ShutdownReason.REBOOT)
_IN_WORDS: dict[int | None, str] = {
    ShutdownReason.REBOOT: "its user rebooted it, and it did not start again",
    ShutdownReason.SUSPEND: "it is suspended, to be saved or moved",
    ShutdownReason.SOFT_RESET: "it has reset itself",
    None: "it ended for a reason that is not known here: none",
}


@dataclass(frozen=True, slots=True)
class Domain:
    """A domain.

    :param number: of Xen; it changes with each start.
    :param state: six letters of :data:`FLAGS`, each in its place or a dash.
    :param uuid: empty if it was not asked for.
    :param reason: a number of :class:`ShutdownReason`; None if it has not shut down, or the reason
        is not known.
    :param cpu_s: the processor time that it has taken, in tenths of a second.
    """

    name: str
    number: int
    memory_mib: int
    vcpus: int
    state: str
    uuid: str = ""
    reason: int | None = None
    cpu_s: float = 0.0

    def has(self, flag: str) -> bool:
        """Whether a letter of :data:`FLAGS` is in its place."""
        place = FLAGS.index(flag)
        return self.state[place : place + 1] == flag

    def is_known(self) -> bool:
        """Whether its state is valid."""
        return bool(_STATE.fullmatch(self.state))

    def has_no_name(self) -> bool:
        """Whether it has no name yet, or no longer."""
        return self.name == _NO_NAME

    def is_zombie(self) -> bool:
        """Whether only its memory is left, which Xen frees, or can't free because it is still
        mapped."""
        return self.has_no_name() and self.is_dying()

    def is_dying(self) -> bool:
        """Whether it is just being destroyed."""
        return self.has("d")

    def lives(self) -> bool:
        """Whether its guest runs, or is paused."""
        return not self.has_ended() and not self.is_dying()

    def never_ran(self) -> bool:
        """Whether it is paused, and its guest has not run yet. xl makes it so, and resumes it when
        all its devices are there."""
        return self.lives() and self.has("p") and not self.cpu_s

    def has_ended(self) -> bool:
        """Whether it has shut down or crashed, and is still there."""
        return not self.is_dying() and (self.has("s") or self.has("c"))

    def has_crashed(self) -> bool:
        """Whether it has crashed. Then Xen sets both flags."""
        return self.has("c") or self.reason in _CRASHES

    def is_over(self) -> bool:
        """Whether it has ended for good. A suspended domain may go on later, or on another node; so
        may one with another reason, or none."""
        return self.has_ended() and (self.has_crashed() or self.reason in _OVER)

    def has_rebooted(self) -> bool:
        """Whether its guest has rebooted, which ends this domain."""
        return self.reason == ShutdownReason.REBOOT

    def is_suspended(self) -> bool:
        """Whether it is suspended, to go on later or on another node."""
        return self.has_ended() and self.reason in _SUSPENDED

    def was_powered_off(self) -> bool:
        """Whether its guest has shut down cleanly, by user or admin."""
        is_clean = self.reason == ShutdownReason.POWEROFF and not self.has_crashed()
        return self.has_ended() and is_clean

    def end(self) -> DomainEnd:
        """How it has ended, if it has."""
        if self.is_zombie():
            return DomainEnd.GONE
        if self.has_crashed():
            return DomainEnd.CRASHED
        if self.was_powered_off():
            return DomainEnd.POWERED_OFF
        return DomainEnd.SUSPENDED if self.is_suspended() else DomainEnd.OTHER

    def how_it_ended(self) -> str:
        """Why it has ended, in words."""
        if self.has_crashed():
            is_fed = self.reason != ShutdownReason.WATCHDOG
            return "it crashed" if is_fed else "it did not feed its watchdog"
        if self.was_powered_off():
            return "it has shut down"
        unknown = f"it ended for a reason that is not known here: {self.reason}"
        return _IN_WORDS.get(self.reason, unknown)


class Listing(NamedTuple):
    """The output of ``xl list``, without the control domain.

    :param unknown: rows that are not understood.
    """

    domains: tuple[Domain, ...] = ()
    unknown: tuple[str, ...] = ()

    def domain_of(self, uuid: str) -> Domain | None:
        """The domain with a UUID; None if there is none. Of several, the one that lives, else one
        that has ended: one that can't be freed may exist beside it.

        :raises XlError: if a row that is not understood has that UUID.
        """
        if any(uuid in row for row in self.unknown):
            raise XlError(f"xl list has a row of the domain {uuid} that is not known here")
        return min(
            (one for one in self.domains if one.uuid == uuid),
            key=lambda one: (not one.lives(), one.is_dying(), -one.number),
            default=None,
        )


def parse_list(text: str) -> Listing:
    """The domains in the output of ``xl list`` or ``xl list -v``."""
    domains, unknown = [], []
    for line in text.splitlines():
        if not line.strip() or _HEADING.match(line):
            continue
        match = _ROW.fullmatch(line)
        if match is None:
            unknown.append(line.strip())
        elif int(match["id"]) != _DOM0:
            domains.append(_domain(match))
    return Listing(tuple(domains), tuple(unknown))


def _domain(match: re.Match[str]) -> Domain:
    reason = match["reason"]
    number = int(reason, 16) if reason and reason != "-" else _NO_REASON
    return Domain(
        name=match["name"],
        number=int(match["id"]),
        memory_mib=int(match["memory"]),
        vcpus=int(match["vcpus"]),
        state=match["state"],
        uuid=match["uuid"] or "",
        reason=None if number == _NO_REASON else number,
        cpu_s=float(match["time"]),
    )


# The messages of xl: many lines, of which the first is the cause, and the others are consequences.

_PLACE = re.compile(r"^(?:libxl|xc|xl): (?:error|panic): (?:panic: )?(?:\w+\.c:\d+:\s?)?(?:\w+: )?")
_DOMAIN = re.compile(r"^Domain \d+:")
_ERROR = re.compile(r"^(?:libxl|xc): (?:error|panic): |\berror\b|^Failed |^xl: ")
_CHILD = "libxl_report_child_exitstatus"
"""This line only says that a script failed; the script's message follows."""


def fault_in(lines: Iterable[str]) -> str | None:
    """Why xl failed, without the place in its source; None if there is no message."""
    faults = [line.strip() for line in lines if _ERROR.search(line.strip())]
    causes = [line for line in faults if _CHILD not in line] or faults
    if not causes:
        return None
    return _DOMAIN.sub("", _PLACE.sub("", causes[0])).removesuffix(": Internal error")


# Commands. They all raise XlError if Xen can't be asked, or refuses.


def domains() -> Listing:
    """All domains; none if xl is not installed."""
    return parse_list(_xl("list", "-v")) if shutil.which(PROGRAM, path=_path()) else Listing()


def domain_of(uuid: str) -> Domain | None:
    """The present domain with a UUID."""
    return domains().domain_of(uuid)


def runs() -> bool:
    """Whether Xen runs, and can be told to make domains."""
    return text_of(_HYPERVISOR) == "xen" and bool(shutil.which(PROGRAM, path=_path()))


def memory() -> XenMemory | None:
    """The memory that Xen has; None where it does not run. What the node's own kernel has is that
    of the first domain."""
    if not runs():
        return None
    rows = dict(_INFO_ROW.findall(_xl("info")))
    try:
        return XenMemory(int(rows["total_memory"]), int(rows["free_memory"]))
    except (KeyError, ValueError):
        raise XlError("xl info: does not tell the memory") from None


def ask_shutdown(number: int, *, timeout_s: float) -> None:
    """Ask the guest of a domain to shut down, and wait until it has received the request."""
    _xl("shutdown", str(number), timeout_s=timeout_s)


def set_paused(number: int, *, paused: bool) -> None:
    _xl("pause" if paused else "unpause", str(number))


def destroy(domain: Domain) -> bool:
    """Destroy a domain, with its memory; returns whether it still existed."""
    there = [(one.number, one.uuid) for one in domains().domains]
    if (domain.number, domain.uuid) not in there:
        return False
    _xl("destroy", str(domain.number), timeout_s=_DESTROY_TIMEOUT_S)
    return True


def _xl(*args: str, timeout_s: float = _TIMEOUT_S) -> str:
    # Its output is parsed, so it must not be translated.
    environment = {**os.environ, "LC_ALL": "C", "PATH": _path()}
    command = f"xl {' '.join(args)}"
    try:
        done = run_bounded([PROGRAM, *args], timeout_s=timeout_s, environment=environment)
    except TimeoutError:
        text = f"{command}: no answer within {round(timeout_s, 1):g} s"
        raise XlError(text, hint="systemctl status xen, or xenstored") from None
    except OSError as error:
        raise _unusable(error) from error
    if done.returncode != 0:
        fault = printable(fault_in(done.stderr.splitlines()) or str(done.returncode))
        raise XlError(f"{command}: {fault}")
    return done.stdout


def require() -> None:
    """Refuse what needs xl, where there is none.

    :raises XlError: that there is none, and what to install.
    """
    if not shutil.which(PROGRAM, path=_path()):
        raise _unusable(FileNotFoundError())


def become(*args: str) -> NoReturn:
    """Become xl. Its output is not translated, as it may be parsed."""
    try:
        os.execvpe(PROGRAM, [PROGRAM, *args], {**os.environ, "LC_ALL": "C", "PATH": _path()})
    except OSError as error:
        raise _unusable(error) from error


def _unusable(error: OSError) -> XlError:
    hint = install_hint(apt="xen-utils", dnf="xen-runtime")
    hint += "; this node must have been booted by Xen"
    if isinstance(error, FileNotFoundError):
        return XlError(f"there is no program {PROGRAM}", hint=hint)
    return XlError(f"{PROGRAM}: {error.strerror}", hint=hint)


def _path() -> str:
    """The search path, with the folders of root's programs."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
