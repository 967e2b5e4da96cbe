"""The rotation of the cluster's key, on the host that gives the key to all nodes.

A rotation is a recorded operation (:mod:`brine.common.operation`). All nodes first *accept* a new
key beside the old one; then the new one *signs*; then they *drop* the old one. Each of these waits
until all nodes have confirmed it: the caller asks them, and reports that.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from brine.common import operation, paths
from brine.common.files import read_regular, write_whole
from brine.common.locks import node_lock
from brine.common.operation import (
    Call,
    Elsewhere,
    Facts,
    Operation,
    OperationKind,
    OperationState,
)
from brine.config.schema import ConfigError

KEY = "cluster/key"
"""The key of a rotation's operation."""

_NODES = "all nodes confirm it: salt-run brine.rotate_key"
_KEY_BYTES = 32
_LOCK_S = 10.0


class RotationStep(StrEnum):
    ACCEPT = "accept"
    SIGN = "sign"
    DROP = "drop"
    DONE = "done"


@dataclass(frozen=True)
class Keys:
    """The keys that nodes are given.

    :param step: for people, and as 0.2.0 kept it; the operation's record decides.
    """

    key: str = field(repr=False)
    previous_key: str = field(default="", repr=False)
    step: RotationStep = RotationStep.DONE

    def digests(self) -> dict[str, str]:
        """The SHA-256 of each key's file; empty for a key that there is not."""
        return {"key": _digest(self.key), "previous_key": _digest(self.previous_key)}


@dataclass(frozen=True)
class Rotation:
    """How far a rotation is.

    :param id: of the operation; empty if none is pending.
    :param step: what all nodes have to confirm now, and *step_id* is the id of that step.
    :param keys: what the nodes are given meanwhile; None if there is no key yet.
    """

    id: str
    step: RotationStep
    step_id: str
    keys: Keys | None


def rotation() -> Rotation:
    """The pending rotation, if there is one; nothing is begun.

    :raises ConfigError: if the keys are damaged.
    """
    record, keys = _pending(), _read()
    step = operation.awaited(record) if record else None
    if record is None or step is None:
        return Rotation("", RotationStep.DONE, "", keys)
    return Rotation(record.id, RotationStep(step.facts["step"]), step.id, keys)


def begin_rotation() -> Rotation:
    """Begin a rotation, or find the pending one. If that only had to end, this call ends it.

    The first one takes over this host's key. Where there is none it makes the first key, which only
    has to be confirmed.

    :raises ConfigError: if the keys are damaged, or this host's key is.
    """
    before = _pending()
    operation.settle(KEY)
    with _alone([KEY]):
        keys, record = _read(), _pending()
        if before and not record and before.state is OperationState.COMMITTED:
            return rotation()
        if record and not (keys and record.facts["key"] in keys.digests().values()):
            _abandon(record)
            record = None
        if record is None:
            _begin(keys)
        return rotation()


def confirm_step(step_id: str) -> Rotation:
    """Go on, as all nodes have confirmed the step that waits for that. Another step, such as one
    that was confirmed before, changes nothing."""
    with _alone([KEY]):
        if step_id == rotation().step_id:
            operation.answered(step_id, {"confirmed": True})
        return rotation()


def _begin(present: Keys | None) -> None:
    """Record a rotation, and give nodes the new key to accept."""
    if present and present.step is not RotationStep.DONE:
        keys = present  # of a rotation that 0.2.0 began, and recorded in the file
    elif present or (own := _own_key()):
        key = present.key if present else own
        keys = Keys(key, secrets.token_hex(_KEY_BYTES), RotationStep.ACCEPT)
    else:
        keys = Keys(secrets.token_hex(_KEY_BYTES), step=RotationStep.DROP)
    new = keys.previous_key if keys.step is RotationStep.ACCEPT else keys.key
    facts = {"key": _digest(new)}
    with operation.begin(ROTATION, KEY, facts=facts) as work:
        if keys != present:
            work.step("write the keys", undo=("undo", facts | {"is_first": present is None}))
            _write(keys)
        work.commit(*_rest(keys.step, facts))


def _rest(first: RotationStep, facts: Facts) -> Iterator[Call | Elsewhere]:
    steps = list(RotationStep)
    for step in steps[steps.index(first) :]:
        if step is not first:
            yield "give", facts | {"step": step}
        if step is not RotationStep.DONE:
            yield Elsewhere(f"{step} the new key", {"step": step}, _NODES)


def _give(facts: Facts) -> None:
    """Give nodes the keys of a step; what has other keys by now is left alone."""
    keys, step = _read(), RotationStep(facts["step"])
    if keys is None or facts["key"] not in keys.digests().values():
        return
    is_new = _digest(keys.key) == facts["key"]
    new, old = (keys.key, keys.previous_key) if is_new else (keys.previous_key, keys.key)
    wanted = Keys(new, old if step is RotationStep.SIGN else "", step)
    if wanted != keys:
        _write(wanted)


def _undo(facts: Facts) -> None:
    keys = _read()
    if keys is None or facts["key"] not in keys.digests().values():
        return
    if facts["is_first"]:
        paths.SALT_KEYS_FILE.unlink()
    elif keys.step is RotationStep.ACCEPT and _digest(keys.previous_key) == facts["key"]:
        _write(Keys(keys.key))


def _pending() -> Operation | None:
    return next(iter(operation.pending(KEY)), None)


def _abandon(record: Operation) -> None:
    """End a rotation whose keys are gone from the file."""
    while (found := operation.find(record.id)) and (step := operation.awaited(found)):
        operation.answered(step.id, {"confirmed": False})


@contextmanager
def _alone(_keys: object) -> Iterator[None]:
    with node_lock("rotate-key", timeout_s=_LOCK_S):
        yield


ROTATION = OperationKind("rotate-key", {"give": _give, "undo": _undo}, alone=_alone)


# The files of keys.


def _digest(key: str) -> str:
    return hashlib.sha256(f"{key}\n".encode()).hexdigest() if key else ""


def _read() -> Keys | None:
    file = paths.SALT_KEYS_FILE
    try:
        data = json.loads(read_regular(file))
        keys = Keys(str(data["key"]), str(data["previous_key"]), RotationStep(data["step"]))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{file}: can't be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{file} is damaged: {error!r}") from None
    if not keys.key:
        raise ConfigError(f"{file} is damaged: it has no key")
    return keys


def _write(keys: Keys) -> None:
    file = paths.SALT_KEYS_FILE
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(file, json.dumps(asdict(keys)).encode(), mode=0o600, alone=True)
    except OSError as error:
        raise ConfigError(f"{file}: can't be written: {error.strerror}") from error


def _own_key() -> str:
    """The key that this host has; empty if it has none."""
    file = paths.KEY_FILE
    try:
        key = read_regular(file).decode().removesuffix("\n")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"{file}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is no text, and can't be taken over") from None
    if not key.strip():
        raise ConfigError(f"{file} is blank: remove it, and a first key is made")
    return key
