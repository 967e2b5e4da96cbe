"""What domains there are, as ``xl list`` has them.

Source: :manpage:`xl(1)`, and the reasons of ``xen/include/public/sched.h``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

FLAGS = "rbpscd"
"""A domain's state in letters: running, blocked, paused, shut down, crashed, dying.

In the place of the fifth xl has another letter if a domain has shut down for another reason: see
:data:`REASONS`.
"""

REASONS = "rscw?"
"""Reboot, suspend, crash, watchdog, another one."""

_ROW = re.compile(
    r"(?P<name>\S.*?)\s+(?P<id>\d+)\s+(?P<memory>\d+)\s+(?P<vcpus>\d+)\s+(?P<state>\S+)"
    r"\s+(?P<time>\d+(?:\.\d+)?)(?:\s+(?P<uuid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
    r"\s+(?P<reason>[0-9a-f]+|-)(?:\s.*)?)?\s*"
)
_NO_NAME = "(null)"
_NO_REASON = 0xFFFFFFFF
_DOM0 = 0


class Reason(IntEnum):
    """Why a domain has shut down."""

    POWEROFF = 0
    REBOOT = 1
    SUSPEND = 2
    CRASH = 3
    WATCHDOG = 4
    SOFT_RESET = 5


@dataclass(frozen=True, slots=True)
class Domain:
    """A domain.

    :param number: Xen's, another one after each start.
    :param state: six letters of :data:`FLAGS`, each in its place or a dash.
    :param uuid: empty where it was not asked for.
    :param reason: a number of :class:`Reason`; None while it has not shut down, or if that is not
        known.
    """

    name: str
    number: int
    memory_mib: int
    vcpus: int
    state: str
    uuid: str = ""
    reason: int | None = None

    def has(self, flag: str) -> bool:
        """Whether a letter of :data:`FLAGS` is in its place."""
        place = FLAGS.index(flag)
        return self.state[place : place + 1] == flag

    def is_known(self) -> bool:
        """Whether its state is one that there can be."""
        letters = [REASONS if flag == "c" else flag for flag in FLAGS]
        places = zip(self.state, letters, strict=False)
        return len(self.state) == len(FLAGS) and all(one in f"-{known}" for one, known in places)

    def has_no_name(self) -> bool:
        """Whether it has not been given a name yet, or has lost it already."""
        return self.name == _NO_NAME

    def is_zombie(self) -> bool:
        """Whether nothing of it is left but its memory. Xen is just taking that back, or can't, as
        somebody still has it mapped."""
        return self.has_no_name() and self.is_dying()

    def is_dying(self) -> bool:
        """Whether it is just being destroyed."""
        return self.has("d")

    def has_ended(self) -> bool:
        """Whether it has shut down or crashed, and is still there."""
        return not self.is_dying() and (self.has("s") or self.has("c"))

    def has_crashed(self) -> bool:
        """Whether that was a crash. Then Xen has both flags."""
        return self.has("c") or self.reason in (Reason.CRASH, Reason.WATCHDOG)

    def is_over(self) -> bool:
        """Whether it has ended for good. One that is suspended goes on somewhere else, or later, if
        nobody takes it away; what has another reason, or none, may as well."""
        return self.has_ended() and (
            self.has_crashed() or self.reason in (Reason.POWEROFF, Reason.REBOOT)
        )

    def is_suspended(self) -> bool:
        """Whether its guest has stopped to go on later, or somewhere else."""
        return self.has_ended() and self.reason in (Reason.SUSPEND, Reason.SOFT_RESET)

    def is_being_moved(self) -> bool:
        """Whether somebody saves it, or moves it to another node."""
        return self.has_ended() and self.reason == Reason.SUSPEND

    def was_powered_off(self) -> bool:
        """Whether its guest has shut down in order. Who wanted that, it does not say."""
        return self.has_ended() and not self.has_crashed() and self.reason == Reason.POWEROFF

    def lives(self) -> bool:
        """Whether its guest runs, or would if it were not paused."""
        return not self.has_ended() and not self.is_dying()


def chosen(several: Sequence[Domain]) -> Domain | None:
    """Which of the domains that have one UUID it is about: the one that lives, then one that has
    ended. One that can't die may be there beside them. None if there is none."""
    newest_first = sorted(several, key=lambda domain: -domain.number)
    return min(
        newest_first, key=lambda domain: (not domain.lives(), domain.is_dying()), default=None
    )


def parse_list(text: str) -> tuple[list[Domain], list[str]]:
    """The domains of a list, without the control domain; and rows that are none.

    :param text: of ``xl list`` or ``xl list -v``.
    """
    domains, unknown = [], []
    for line in _rows(text.splitlines()):
        match = _ROW.fullmatch(line)
        if match is None:
            unknown.append(line.strip())
        elif int(match["id"]) != _DOM0:
            domains.append(_domain(match))
    return domains, unknown


def _rows(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if line.strip() and not re.match(r"Name\s+ID\s", line):
            yield line


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
    )
