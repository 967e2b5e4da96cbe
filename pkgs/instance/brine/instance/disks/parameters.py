"""What the cluster says of the volumes that are made on this node: ``diskparams``."""

from __future__ import annotations

from dataclasses import dataclass

from brine.common import paths
from brine.instance.store import is_this_node

_KIND = "plain"
_KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class VolumeParameters:
    """How new logical volumes are made, unless a command says otherwise.

    :param stripe_size: in bytes; 0 is LVM's own.
    :param group: the volume group; empty if the cluster names none.
    """

    stripes: int = 1
    stripe_size: int = 0
    group: str = ""


def volume_parameters() -> VolumeParameters:
    """The parameters of this node, as its cluster has them in ssconf.

    :raises brine.config.ssconf.SsconfError: if they can't be read.
    """
    # On a node of no cluster, or one whose master has an older Brine, there are none.
    if not (paths.SSCONF_DIR / f"ssconf_diskparams_{_KIND}").exists():
        return VolumeParameters()
    from brine.config.ssconf import Ssconf  # it takes long to load

    said = Ssconf(paths.SSCONF_DIR).disk_params(_KIND, is_this_node)
    return VolumeParameters(said["stripes"], said["stripesize"] * _KIB, said["vg"])
