"""What becomes of an instance on the node that it leaves: stopped for a cold move, started again if
that fails, and removed when it runs elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from brine.instance import store
from brine.instance.messages import tell
from brine.instance.observe import look
from brine.instance.registry import undefine_instance
from brine.instance.start import start_instance
from brine.instance.stop import stop_instance, told_to_stop, wait_stopped
from brine.instance.store import InstanceError, is_here
from brine.moves import messages
from brine.moves.copying import remove_volume
from brine.moves.outgoing import Outgoing
from brine.moves.source import SourceMove
from brine.storage.volumes import volume_in

_ENDS_S = 60.0


def stop_for_move(move: SourceMove) -> None:
    """Stop an instance that should be up nevertheless, on the other node."""
    stop_instance(
        move.instance, force=True, cause=f"to move to {move.target}", keeps_admin_state=True
    )


def start_again(move: SourceMove) -> None:
    """Start an instance that was stopped for a move which has failed."""
    start_instance(move.instance, keeps_tries=True)


def end_here(
    move: SourceMove,
    uuid: str,
    copied: Mapping[str, str],
    outgoing: Outgoing,
    *,
    downtime_ms: int = 0,
) -> None:
    """Remove an instance that runs on the target by now, or is to be off there: its QEMU, its
    volumes that were copied, and its spec. The note of its claim stays. Done twice, it removes what
    is left.

    :param copied: the units of the disks that were copied, by UUID. What is mounted now does not
        tell: the guest may use a volume that looks like one of this node alone.
    :param downtime_ms: for how long the guest stood still; 0 if it did not run, or that is not
        known.
    :raises BrineError: what can't be removed now.
    """
    spec = store.load_sound(move.instance)
    if spec is None or spec.uuid != uuid or is_here(spec):
        return
    _end_qemu(move, outgoing)
    for disk, unit in copied.items():
        remove_volume(volume_in(unit, disk))
    undefine_instance(move.instance)
    known = {"node": move.target, "serial": move.serial, "downtime_ms": downtime_ms}
    tell(messages.MOVED_AWAY, move.instance, **known)


def _end_qemu(move: SourceMove, outgoing: Outgoing) -> None:
    """End the QEMU that the guest has left. The marker of its stop says where the guest is."""
    seen = look(move.instance)
    if not seen.is_going:
        return
    if seen.run.id != move.run:
        raise InstanceError(move.instance, "was started again on this node, and is another's")
    with told_to_stop(move.instance, seen.unit, cause=f"moved to {move.target}") as (guest, run):
        outgoing.quit(timeout_s=_ENDS_S)
        if not guest.ended(_ENDS_S):
            guest.kill()
    wait_stopped(run)
