"""How people call a disk of an instance."""

from __future__ import annotations

from brine.instance.store import InstanceError
from brine.vm.disk import Disk
from brine.vm.spec import Spec
from brine.vm.values import tidy_path


def find_disk(spec: Spec, reference: str) -> Disk:
    """The disk of an instance with that name, UUID, path or serial.

    :raises InstanceError: if it has none, or several.
    """
    wanted = reference.lower()
    found = [
        one
        for one in spec.disks
        if wanted in (one.name, one.uuid, one.guest_serial().lower())
        or (reference.startswith("/") and tidy_path(reference) == one.path)
    ]
    if len(found) == 1:
        return found[0]
    known = ", ".join(one.name or one.uuid for one in spec.disks) or "none"
    text = f"has {'several disks' if found else 'no disk'} known as {reference}"
    raise InstanceError(spec.name, text, hint=f"its disks are: {known}")
