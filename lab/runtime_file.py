"""The runtime file of an instance, as its start writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from brine.instance.kvm.layout import layout_of
from brine.vm.files import InstanceFiles
from brine.vm.spec import Spec, to_json
from brine.vm.vif import Vif


def write_runtime_file(spec: Spec, **others: Any) -> Path:
    """Write the runtime file of an instance that was started with its spec; returns its path.

    :param others: its other keys.
    """
    layout = layout_of(spec)
    disks = [
        one.entry(10, layout.disks[one.uuid])
        for one in spec.disks
        if one.uuid in layout.disks  # those of IDE are not recorded
    ]
    nics = [Vif.of(spec, one).recorded(layout.nics[one.uuid]) for one in spec.nics]
    data = {"spec": to_json(spec), "command": ["qemu"], "nics": nics, "disks": disks, **others}
    file = InstanceFiles(spec.name).runtime
    file.write_text(json.dumps(data))
    return file
