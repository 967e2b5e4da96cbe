"""What an instance was started as last, for who has no sound spec of it any more."""

from __future__ import annotations

import os
from dataclasses import replace

from brine.hotplug.disk_uses import runtime_of
from brine.instance.control import control_of
from brine.instance.schema import SpecError, parse
from brine.instance.spec import AdminState, Source, Spec


def started_as(name: str) -> Spec | None:
    """The spec that the runtime file of an instance has; None if it has none that can be used.

    Its name is that of the start. If the admin has stopped it since, it should be down.
    """
    try:
        spec = parse(Spec, (runtime_of(name) or {}).get("spec"))
    except SpecError:
        return None
    if not os.path.lexists(control_of(name).stopping):
        return spec
    down, admin = AdminState.DOWN.value, Source.ADMIN.value
    return replace(spec, admin_state=down, admin_state_source=admin)
