"""What the node does that a guest moves to: decisions only, no I/O.

The node keeps a :class:`TargetMove` from the master's *prepare* until the guest runs, or the move
is dropped. It does nothing of its own accord before it has taken the claim. The source asks it to
*hold*, and tells it to *go*, directly, and repeats both until they are answered::

    hold   the QEMU has all of the guest, or the copies are whole; the volumes are closed to the
           source, and synced
    go     take the claim, durably; then continue the QEMU. One that has ended since is started anew

The node takes a claim only from *go*, which the source sends when it has given the claim away.
Having said that it holds the guest, it drops nothing unless the master says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import NamedTuple


class TargetStep(StrEnum):
    """The steps that the master asks of the target."""

    PREPARE = "prepare"
    DROP = "drop"


class TargetGuest(Enum):
    """The guest here, as its QEMU tells."""

    NONE = auto()
    INCOMING = auto()  # it waits for the guest, or receives it
    COMPLETE = auto()  # it has all, and is paused
    RUNS = auto()


def target_guest(status: str) -> TargetGuest:
    """The guest as its QEMU tells.

    :param status: of ``query-status``; empty if there is no QEMU.
    """
    if not status:
        return TargetGuest.NONE
    known = {"inmigrate": TargetGuest.INCOMING, "paused": TargetGuest.COMPLETE}
    return known.get(status, TargetGuest.RUNS)


class TargetAct(Enum):
    """What the node does next."""

    REFUSE = auto()  # answer that it can't, with the error
    PREPARE = auto()  # make volumes, and start the QEMU that waits for the guest
    ANSWER_DONE = auto()  # a step of the master is done
    ANSWER_WAIT = auto()  # ask again
    CLOSE = auto()  # end what lets the source write into the volumes
    SYNC = auto()  # have the volumes survive a loss of power, then answer that all is held
    TAKE = auto()  # the claim, durably
    CONTINUE = auto()  # the QEMU that has the guest
    START = auto()  # the instance, as after any loss of power; a QEMU that waits ends before
    END = auto()  # end the record: the guest runs, or is to be off
    ANSWER_RUNS = auto()
    DROP = auto()  # end the QEMU, remove the volumes, end the record


class Fate(StrEnum):
    """What becomes of a move: the master's *drop* and the source's *go* meet in this durable word,
    and the first of the two counts. Once it is recorded, nothing changes it."""

    TAKE = "take"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class TargetMove:
    """What the node keeps of a move, durably.

    :param id: of the master's operation. Later moves have higher ones.
    :param serial: of the claim that this node gets.
    :param runs: the guest runs after the move.
    :param is_prepared: the preparation was done once: a QEMU that is missing has ended.
    """

    id: str
    instance: str
    source: str
    serial: int
    is_live: bool
    copies: bool
    runs: bool
    is_prepared: bool = False


@dataclass(frozen=True, slots=True)
class TargetView:
    """What the node sees.

    :param is_taken: this node has seen the claim of the move, or a newer one.
    :param is_ended: this move, or a later one of the instance, has ended here.
    :param is_open: the source can write into the volumes.
    :param is_whole: the copies are those that the source has, by their checksums; or there are
        none to make.
    """

    guest: TargetGuest
    is_taken: bool = False
    is_ended: bool = False
    is_open: bool = False
    is_whole: bool = False


class TargetDecision(NamedTuple):
    """The next act; *error* is why it refuses."""

    act: TargetAct
    error: str = ""


_ENDED = TargetDecision(TargetAct.REFUSE, "the move has ended here")
_UNKNOWN = TargetDecision(TargetAct.REFUSE, "no such move is prepared here")


def prepare_act(move: TargetMove | None, view: TargetView) -> TargetDecision:
    """What follows when the master asks to prepare.

    :param move: None if there is no record yet: the act PREPARE makes that first.
    """
    if view.is_taken:
        return TargetDecision(TargetAct.REFUSE, "this node has seen this claim, or a newer one")
    if move is None:
        return _ENDED if view.is_ended else TargetDecision(TargetAct.PREPARE)
    if not move.is_prepared:
        return TargetDecision(TargetAct.PREPARE)
    if move.is_live and view.guest is TargetGuest.NONE:
        return TargetDecision(TargetAct.REFUSE, "the QEMU that waits for the guest has ended")
    return TargetDecision(TargetAct.ANSWER_DONE)


def hold_act(move: TargetMove | None, view: TargetView) -> TargetDecision:
    """What follows when the source asks whether all of the guest is here."""
    if move is None:
        return _UNKNOWN
    if move.is_live and view.guest is TargetGuest.NONE:
        return TargetDecision(TargetAct.REFUSE, "the QEMU that waits for the guest has ended")
    if move.is_live and view.guest is TargetGuest.INCOMING:
        return TargetDecision(TargetAct.ANSWER_WAIT)
    if view.is_open:  # nothing changes the volumes while they are compared, nor later
        return TargetDecision(TargetAct.CLOSE)
    if not (move.is_live or view.is_whole):
        return TargetDecision(TargetAct.REFUSE, "the copies differ from the source's volumes")
    return TargetDecision(TargetAct.SYNC)


def go_act(move: TargetMove | None, view: TargetView) -> TargetDecision:
    """What follows when the source says that the claim is this node's: also that of a move which
    has ended since, as the message is repeated."""
    if view.is_taken:
        return TargetDecision(taken_act(move, view))
    return TargetDecision(TargetAct.TAKE) if move else _UNKNOWN


def taken_act(move: TargetMove | None, view: TargetView) -> TargetAct:
    """What follows once the claim is taken, by itself too: after the node's boot, or a kill."""
    if move is None:
        return TargetAct.ANSWER_RUNS
    if view.guest is TargetGuest.RUNS:
        return TargetAct.END
    if view.guest is TargetGuest.COMPLETE:
        return TargetAct.CONTINUE
    return TargetAct.START if move.runs else TargetAct.END


def drop_act(move: TargetMove | None, view: TargetView) -> TargetDecision:
    """What follows when the master drops the move. It may not have come here before: then the
    record of its end keeps a preparation from beginning later. A claim that was taken without a
    record of this move is another move's: this one goes back because its source never gave it."""
    if view.is_taken and move is None:
        return TargetDecision(TargetAct.ANSWER_DONE)
    if view.is_taken:
        return TargetDecision(TargetAct.REFUSE, "this node has taken the claim")
    is_over = move is None and view.is_ended
    return TargetDecision(TargetAct.ANSWER_DONE if is_over else TargetAct.DROP)
