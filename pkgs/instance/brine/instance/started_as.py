"""What an instance was started as last, for who has no sound spec of it any more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from brine.common import marks
from brine.common.marks import Kind
from brine.hotplug.disk_uses import runtime_of
from brine.instance.control import domain_file
from brine.instance.schema import SpecError, parse
from brine.instance.spec import AdminState, Source, Spec


def started_as(name: str) -> Spec | None:
    """The spec that the runtime file of an instance has, or what xl was given; None if there is
    none that can be used.

    Its name is that of the start. If the admin has stopped it since, it should be down.
    """
    try:
        spec = parse(Spec, _on_xen(name) or (runtime_of(name) or {}).get("spec"))
    except (SpecError, OSError, ValueError, RecursionError):
        return None
    if marks.read_mark(Kind.STOP, name, run=marks.last_run(name)) is None:
        return spec
    down, admin = AdminState.DOWN.value, Source.ADMIN.value
    return replace(spec, admin_state=down, admin_state_source=admin)


def _on_xen(name: str) -> Any:
    if not domain_file(name).exists():
        return None
    from brine.instance.xen.started import spec_in  # most are QEMU's

    return spec_in(name)
