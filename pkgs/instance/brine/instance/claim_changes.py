"""Changes of claims: an instance is given away, taken, set aside, or its claim is forgotten.

Each is on the disk when its function returns, so whichever node starts next sees it. A repeated
call changes nothing more.
"""

from __future__ import annotations

from dataclasses import replace

from brine.instance import messages, store
from brine.instance.claims import note_of, notes, remove_note, remove_notes_on
from brine.instance.observe import look
from brine.instance.store import InstanceError, is_here, is_this_node
from brine.vm.claim import Claim
from brine.vm.spec import Spec


def give_away(name: str, to: str, serial: int, *, is_live: bool = False) -> None:
    """Give an instance to another node, which may take it from then on. This node starts it no
    more, whatever happens.

    :param to: the name of that node.
    :param serial: of the claim; higher than that of the present one.
    :param is_live: its QEMU is here still, and must never run its guest again.
    :raises InstanceError: if it is not this node's to give, or it runs.
    """
    if is_this_node(to):
        raise InstanceError(name, f"can't be given to {to}, which is this node")
    with store.alone(name):
        spec, claim = store.load(name), Claim(to, serial)
        if spec.claim == claim:
            return
        if not is_here(spec):
            raise InstanceError(name, f"is {spec.node}'s, and not this node's to give")
        _refuse_older(spec, claim)
        if not is_live and look(name).is_going:
            raise InstanceError(name, "runs", hint=f"brine instance stop {name}")
        _save(spec, claim)
    messages.tell(messages.GIVEN_AWAY, name, node=to, serial=serial)


def take(name: str, claim: Claim) -> None:
    """Take an instance whose spec is here, by a claim that names this node.

    :raises InstanceError: if this node has seen a newer claim, or this one names another node.
    """
    if not is_this_node(claim.node):
        raise InstanceError(name, f"its claim names {claim.node}, which is not this node")
    with store.alone(name):
        spec = store.load(name)
        if spec.claim == claim:
            return
        if (note := note_of(spec.uuid)) and (fault := claim.fault(note.claim, is_this_node)):
            raise InstanceError(name, fault)
        _refuse_older(spec, claim)
        before = spec
        spec = _save(spec, claim)
        with store.telling(name, "the note of its claim can't be removed"):
            remove_notes_on(spec)
    if not is_here(before):
        messages.tell(messages.TAKEN, name, node=before.node, serial=claim.serial)


def set_aside(name: str, uuid: str, claim: Claim) -> bool:
    """Leave an instance of another node where it is, and start it no more; returns whether that is
    new.

    :param uuid: of the instance: one of that name that has another is left alone.
    """
    with store.alone(name):
        spec = store.load(name)
        if spec.uuid != uuid or spec.claim_serial >= claim.serial or is_this_node(claim.node):
            return False
        was_here = is_here(spec)
        _save(spec, claim)
    if was_here:
        messages.tell(messages.SET_ASIDE, name, node=claim.node, serial=claim.serial)
    return was_here


def forget_claim(name: str) -> bool:
    """Forget whose an instance is, as if no configuration had said so; returns whether that was
    known.

    :param name: of an instance that is here, or that a note names.
    """
    is_known = False
    with store.alone(name):
        for note in notes():
            if note.name == name:
                with store.telling(name, "the note of its claim can't be removed"):
                    is_known |= remove_note(note.uuid)
        if (spec := store.load_sound(name)) and spec.claim_serial:
            _save(spec, Claim())
            is_known = True
    if is_known:
        messages.tell(messages.CLAIM_FORGOTTEN, name)
    return is_known


def _refuse_older(spec: Spec, claim: Claim) -> None:
    if claim.serial <= spec.claim_serial:
        text = f"its claim has serial {spec.claim_serial}, and {claim.serial} is no later"
        raise InstanceError(spec.name, text)


def _save(spec: Spec, claim: Claim) -> Spec:
    changed = replace(spec, node=claim.node, claim_serial=claim.serial)
    store.save(changed)
    return changed
