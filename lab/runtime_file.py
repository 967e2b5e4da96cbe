"""The runtime file of an instance, as its start writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from brine.hotplug.disk import recorded_disk
from brine.hotplug.nic import recorded_nic
from brine.instance.devices import disk_of, nic_of
from brine.instance.kvm.layout import layout_of
from brine.vm.files import InstanceFiles
from brine.vm.spec import Spec, to_json


def write_runtime_file(spec: Spec, **others: Any) -> Path:
    """Write the runtime file of an instance that was started with its spec; returns its path.

    :param others: its other keys.
    """
    layout = layout_of(spec)
    disks = [
        recorded_disk(disk_of(one), 10, layout.disks[one.uuid])
        for one in spec.disks
        if one.uuid in layout.disks  # those of IDE are not recorded
    ]
    nics = [recorded_nic(nic_of(spec, one), layout.nics[one.uuid]) for one in spec.nics]
    data = {"spec": to_json(spec), "command": ["qemu"], "nics": nics, "disks": disks, **others}
    file = InstanceFiles(spec.name).runtime
    file.write_text(json.dumps(data))
    return file
