"""The states of this node's instances, as they are now."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from brine.common import paths
from brine.common.errors import BrineError
from brine.instance import spec_files, unit
from brine.instance.control import control_of
from brine.instance.spec import Spec
from brine.instance.spec_files import InstanceError
from brine.instance.state import State, state_of
from brine.instance.unit import Unit


@dataclass(frozen=True, slots=True)
class Seen:
    """An instance as it is.

    :param unit: what systemd says of it; None if it has not loaded it.
    :param was_stopped: whether somebody has stopped it on the admin's behalf since its last start.
    :param has_run: whether it has run since the node's start.
    """

    spec: Spec
    state: State
    unit: Unit | None
    was_stopped: bool = False
    has_run: bool = False


def look(name: str) -> Seen:
    """One instance.

    :raises BrineError: if there is none, or that can't be found out.
    """
    spec = spec_files.load(name)
    return _seen(spec, unit.units([name]).get(name), _marks())


def look_at_all() -> Iterator[Seen | InstanceError]:
    """All of this node's instances, by name; what is wrong, where one's spec can't be used.

    :raises BrineError: if that can't be found out.
    """
    loaded = unit.units()
    marks = _marks()
    for spec in spec_files.load_all():
        if isinstance(spec, InstanceError):
            yield spec
        else:
            yield _seen(spec, loaded.get(spec.name), marks)


def _seen(spec: Spec, found: Unit | None, marks: frozenset[str]) -> Seen:
    control = control_of(spec.name)
    shut_down, stopped = control.shutdown.name in marks, control.stopping.name in marks
    has_run = control.started.name in marks
    state = state_of(spec, found, user_shut_down=shut_down, stopped=stopped, has_run=has_run)
    return Seen(spec, state, found, was_stopped=stopped, has_run=has_run)


def _marks() -> frozenset[str]:
    """What is in the control directory, of all instances: how they ended."""
    try:
        return frozenset(os.listdir(paths.CONTROL_DIR))
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        hint = "be root, or in the group brine" if isinstance(error, PermissionError) else None
        text = f"{paths.CONTROL_DIR}: can't be read: {error.strerror}"
        raise BrineError(text, hint=hint) from error
