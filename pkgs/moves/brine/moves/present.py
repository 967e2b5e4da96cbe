"""What an instance is at present that moves away: what its offer is of, and what the move begins
with."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress

from brine.common.mounts import MOUNTS
from brine.instance.kvm.runtime_devices import with_hot_changes
from brine.instance.movable import disks_on_network
from brine.instance.observe import Observed
from brine.instance.store import InstanceError
from brine.vm.address import DeviceKind
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from brine.vm.runtime_file import Runtime, qemu_id
from brine.vm.spec import Spec, to_json


def present_spec(seen: Observed) -> Spec:
    """The spec, with the devices that an instance has now, or its next start would have."""
    if seen.spec.is_xen():
        return seen.spec
    if seen.is_going:
        return with_hot_changes(seen.spec)
    with suppress(InstanceError):  # its start would tell the fault
        return with_hot_changes(seen.spec)
    return seen.spec


def state_of(seen: Observed) -> str:
    """A digest of what is offered of an instance: of its spec with its present devices, and whether
    it runs. It differs once something was defined, plugged or unplugged."""
    data = json.dumps([to_json(present_spec(seen)), seen.is_going], sort_keys=True)
    return hashlib.sha256(data.encode()).hexdigest()


def device_ids(spec: Spec) -> dict[str, str]:
    """QEMU's ids of an instance's disks, by UUID."""
    runtime = Runtime.load(InstanceFiles(spec.name).runtime)
    rows = runtime.devices[DeviceKind.DISK]
    return {row["uuid"]: device_id for row in rows if (device_id := qemu_id(row))}


def copied_disks(spec: Spec) -> list[Disk]:
    """The disks of an instance of which each node has a volume of its own."""
    on_network = disks_on_network(spec.disks, MOUNTS.read_text(errors="replace"))
    return [one for one in spec.disks if one.unit and one.uuid not in on_network]
