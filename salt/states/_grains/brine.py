"""
What a node has of Brine
========================

::

    brine:
      version: 0.2.0         # of brine-common; empty without
      parts: [confd, config, hotplug, instance, kvmd, watcher]
      hypervisor: kvm        # or xen; empty if the node can run no virtual machine

So ``salt -G 'brine:parts:confd' brine.confd_ping`` asks the nodes that have brine-confd. A run of
Salt that installs parts has the grains from before; ``saltutil.refresh_grains`` looks anew.
"""

from __future__ import annotations

import os
import re
from glob import glob
from typing import Any

# Debian's, and the Red Hat family's. They are listed, as that takes less than a process.
_FOLDERS = ("/usr/lib/python3/dist-packages", "/usr/lib/python3.[0-9]*/site-packages")
_METADATA = re.compile(r"brine_(\w+)-([^-]+)\.(?:dist|egg)-info")
_XEN = "/proc/xen/capabilities"
"""Has ``control_d`` where domains are made."""


def brine() -> dict[str, Any]:
    """The version and the parts of Brine, and the hypervisor."""
    versions: dict[str, str] = {}
    for folder in (found for pattern in _FOLDERS for found in glob(pattern)):
        for name in os.listdir(folder):
            if match := _METADATA.fullmatch(name):
                versions[match[1]] = match[2]
    version = versions.pop("common", "")
    found = {"version": version, "parts": sorted(versions), "hypervisor": _hypervisor()}
    return {"brine": found}


def _hypervisor() -> str:
    try:
        with open(_XEN, encoding="ascii") as file:
            if "control_d" in file.read():
                return "xen"
    except OSError:
        pass  # most nodes have no Xen
    return "kvm" if os.path.exists("/dev/kvm") else ""
