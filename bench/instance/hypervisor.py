"""A node where both can start the same guests."""

import contextlib
from collections.abc import Iterator

from bench.instance.guests import LIBVIRTS_USER, QMP_FOLDER
from bench.libvirt_node import LibvirtNode, libvirt_node

_OURS = ("brine-common", "brine-config", "brine-hotplug", "brine-kvmd", "brine-instance")

_PREPARE = f"install --directory --owner={LIBVIRTS_USER} --group={LIBVIRTS_USER} {QMP_FOLDER}"


@contextlib.contextmanager
def hypervisor() -> Iterator[LibvirtNode]:
    """The node; gone when the block ends."""
    with libvirt_node(_OURS) as found:
        found.node.shell(_PREPARE)
        yield found
