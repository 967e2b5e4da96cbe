"""Which instances this node may run: the one check that definitions, starts and the watcher pass.

A node knows the claim of an instance by its spec; and by a note, once the spec is gone: so it
refuses a definition that is older than the move that took the instance away. After a boot, some
instances may be held back until the cluster has said whose they are (brine-moves(8)).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.files import read_json, sync_folder, unfinished, write_whole
from brine.instance.store import ELSEWHERE, InstanceError, group, is_this_node, load_sound
from brine.vm.claim import UNCLAIMED, Claim
from brine.vm.spec import Spec, SpecError

_MODE = 0o640
_SUFFIX = ".json"
_ASK = "brine node ask asks again; start_unasked in brine-moves.toml(5) says what starts without"
_NOT_ASKED = "since its boot, this node has not asked which instances are still its own"


class ClaimNote(NamedTuple):
    """The note of an instance that is another node's, and has no spec here.

    :param since: when it left, in seconds since 1970.
    """

    uuid: str
    name: str
    node: str
    serial: int
    since: float

    @property
    def claim(self) -> Claim:
        return Claim(self.node, self.serial)


class ClaimBar(NamedTuple):
    """Why this node may not run an instance now.

    :param why: follows the instance's name.
    :param node: whose it is; empty if that is not known.
    """

    why: str
    hint: str
    node: str = ""


class KnownClaims:
    """What this node knows of claims beside its specs, as it was when this was made."""

    def __init__(self) -> None:
        self._noted = frozenset(_names(paths.CLAIMS_DIR))

    def bar_to(self, spec: Spec) -> ClaimBar | None:
        """Why this node may not run an instance now; None if it may."""
        seen = UNCLAIMED
        if f"{spec.uuid}{_SUFFIX}" in self._noted:
            try:
                note = note_of(spec.uuid)
            except BrineError as error:
                return ClaimBar(str(error), error.hint or "")
            seen = note.claim if note else UNCLAIMED
        if fault := spec.claim.fault(seen, is_this_node):
            return _elsewhere(spec, fault, seen)
        if why := self._held_back.get(spec.uuid) or self._held_back.get(""):
            return ClaimBar(f"is held back: {why}", _ASK)
        return None

    @cached_property
    def _held_back(self) -> Mapping[str, str]:
        """Why instances are held back, by UUID; "" stands for all."""
        try:
            data = paths.UNASKED_FILE.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            return {"": f"{paths.UNASKED_FILE}: {error.strerror}"}
        with suppress(ValueError, RecursionError, AttributeError):
            return {str(uuid): str(why) for uuid, why in json.loads(data).items()}
        return {"": _NOT_ASKED}  # as the boot has made it


def refuse_barred(spec: Spec) -> None:
    """Refuse to run an instance that is another node's, or may be.

    :raises InstanceError: whose it is.
    """
    if bar := KnownClaims().bar_to(spec):
        raise InstanceError(spec.name, bar.why, hint=bar.hint)


def refuse_elsewhere(spec: Spec) -> None:
    """Refuse to have the guest of a QEMU go on here that is another node's: it may run there.

    :raises InstanceError: whose it is.
    """
    if (bar := KnownClaims().bar_to(spec)) and bar.node:
        raise InstanceError(spec.name, bar.why, hint=bar.hint)


def refuse_old_claim(spec: Spec, before: Spec | None) -> None:
    """Refuse a definition by a claim that is older than one that this node has seen, or names
    another node than that.

    :param before: the present spec.
    :raises SpecError: whose it is.
    """
    seen = [UNCLAIMED]
    if before and _is_comparable(spec, before.uuid):
        seen.append(before.claim)
    if note := note_of(spec.uuid):
        seen.append(note.claim)
    if not spec.claim_serial:
        seen += [note.claim for note in notes() if note.name == spec.name]
    for claim in seen:
        if fault := spec.claim.fault(claim, is_this_node):
            bar = _elsewhere(spec, fault, claim)
            raise SpecError(bar.why, where="/node", hint=bar.hint)


def _is_comparable(spec: Spec, uuid: str) -> bool:
    """Whether a claim of another UUID says something about a spec. Serials of two objects of a
    configuration are not related; without one, the name says which instance is meant."""
    return spec.uuid == uuid or not spec.claim_serial


def _elsewhere(spec: Spec, fault: str, seen: Claim) -> ClaimBar:
    here = os.uname().nodename
    claim = spec.claim if spec.node and not is_this_node(spec.node) else seen
    if not claim.serial:
        return ClaimBar(f"{fault}, and this is {here}", ELSEWHERE, claim.node)
    hint = f"do that, and declare it, on {claim.node}; or on the cluster's master: brine instance "
    hint += f"migrate {spec.name} --to {here}. "
    hint += f"If the claim is wrong: brine node claims --forget {spec.name}"
    return ClaimBar(f"{fault}, and this is {here}", hint, claim.node)


# The notes.


def notes() -> list[ClaimNote]:
    """All notes that can be read, by the names of the instances."""
    found = []
    for file in _names(paths.CLAIMS_DIR):
        if file.endswith(_SUFFIX) and not file.startswith("."):
            with suppress(BrineError):  # a damaged one stops its own instance
                found.append(note_of(file.removesuffix(_SUFFIX)))
    return sorted((one for one in found if one), key=lambda note: (note.name, note.uuid))


def note_of(uuid: str) -> ClaimNote | None:
    """The note of an instance; None if there is none.

    :raises BrineError: if there is a damaged one.
    """
    file = _note_file(uuid)
    if (data := read_json(file)) is None and not file.exists():
        return None
    try:
        note = ClaimNote(
            uuid, str(data["name"]), str(data["node"]), int(data["serial"]), float(data["since"])
        )
    except (TypeError, KeyError, ValueError):
        hint = "remove the file if the instance may run here"
        raise BrineError(f"{file}: is damaged", hint=hint) from None
    return note


def has_seen(name: str, uuid: str, serial: int) -> bool:
    """Whether this node has seen a claim of that serial of an instance, or a newer one."""
    spec = load_sound(name)
    if spec and spec.uuid == uuid and spec.claim_serial >= serial:
        return True
    note = note_of(uuid)
    return note is not None and note.serial >= serial


def note_claim(spec: Spec) -> None:
    """Note the claim of an instance of another node, whose spec is about to be removed. The note is
    on the disk when this returns.

    :raises OSError: if it can't be written.
    """
    data: dict[str, Any] = {
        "name": spec.name,
        "node": spec.node,
        "serial": spec.claim_serial,
        "since": time.time(),
    }
    if not paths.CLAIMS_DIR.is_dir():
        paths.CLAIMS_DIR.mkdir(mode=0o750, parents=True, exist_ok=True)
        sync_folder(paths.CLAIMS_DIR.parent)
    content = json.dumps(data).encode() + b"\n"
    write_whole(_note_file(spec.uuid), content, mode=_MODE, group=group(), alone=True)


def remove_note(uuid: str) -> bool:
    """Forget an instance that left; returns whether there was a note. Raises OSError."""
    file = _note_file(uuid)
    unfinished(file).unlink(missing_ok=True)
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True


def remove_notes_on(spec: Spec) -> None:
    """Forget what was noted of an instance that is defined here now. Raises OSError."""
    for note in notes():
        if spec.uuid == note.uuid or (spec.name == note.name and spec.claim_serial):
            remove_note(note.uuid)


def _note_file(uuid: str) -> Path:
    return paths.CLAIMS_DIR / f"{uuid}{_SUFFIX}"


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except PermissionError:
        return []  # of a user who may not start instances
    except OSError as error:
        raise BrineError(f"{folder}: can't be read: {error.strerror}") from error
