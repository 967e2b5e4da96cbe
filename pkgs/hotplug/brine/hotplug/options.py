"""The NICs and disks that the options of commands want."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from brine.common.errors import UsageError
from brine.vm.address import Bus, uuid_of_path
from brine.vm.connection import parse_address
from brine.vm.disk import Disk, FormatSource, Interface
from brine.vm.nic import usual_filter, usual_wiring
from brine.vm.values import Mode
from brine.vm.vif import Vif


def nic_from(arguments: argparse.Namespace, instance: str, nic: str) -> Vif:
    """The NIC that the options want.

    :param nic: its UUID or index.
    :raises UsageError: if there can be no such NIC.
    """
    mode, link = usual_wiring(arguments.mode, arguments.link)
    index = int(nic) if nic.isdecimal() else None
    usual = Vif(
        instance=instance,
        uuid=nic,
        mode=Mode(mode),
        index=index,
        filter=usual_filter(arguments.filter),
    )
    return with_options(arguments, usual, link=link)


def with_options(arguments: argparse.Namespace, old: Vif, *, link: str | None = None) -> Vif:
    """A NIC with the changes that the options want. With another mode, it loses its link and VLAN.

    :param link: in place of that of the options.
    :raises UsageError: if there can be no such NIC.
    """
    given: dict[str, Any] = {
        # ``brine tap`` has no model.
        key: getattr(arguments, key, None)
        for key in ("link", "vlan", "filter", "mac", "mtu", "index", "model", "queues", "vhost")
    }
    if link is not None:
        given["link"] = link
    if arguments.mode:
        given["mode"] = Mode(arguments.mode)
    if arguments.ip is not None:
        # In the canonical form.
        given["ips"] = tuple(str(parse_address(ip)) for ip in arguments.ip if ip)
    if arguments.tag is not None:
        given["tags"] = tuple(arguments.tag)
    if arguments.network is not None:
        given["network"] = _network(arguments.network)
    if given.get("mode") not in (None, old.mode):
        old = replace(old, link="", vlan="")
    new = replace(old, **{key: value for key, value in given.items() if value is not None})
    new.check()
    return new


def _network(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not re.fullmatch(r"[A-Z][A-Z0-9_]*", key):
            hint = "such as --network NAME=blue --network SUBNET=192.0.2.0/24"
            raise UsageError(f"not KEY=VALUE of a network: {pair!r}", hint=hint)
        found[f"NETWORK_{key.removeprefix('NETWORK_')}"] = value
    return found


def disk_from(arguments: argparse.Namespace) -> Disk:
    """The disk that the options want.

    :raises UsageError: if there can be no such disk.
    """
    if arguments.aio == "native" and arguments.cache not in ("none", "directsync"):
        hint = "choose --cache none or directsync, or --aio threads"
        raise UsageError("--aio native needs a cache mode that is direct", hint=hint)
    if arguments.controller and arguments.bus != Bus.SCSI:
        raise UsageError("--controller is of SCSI", hint="give --bus scsi too")
    path = os.path.abspath(arguments.path)
    # The same path gives the same UUID, so a repeated command does not plug it in twice. The target
    # of a symbolic link such as /dev/vg/lv may differ after a reboot.
    return Disk(
        uuid=arguments.uuid or uuid_of_path(path),
        path=path,
        format=arguments.format or "raw",
        format_source=(FormatSource.ADMIN if arguments.format else FormatSource.DEFAULT).value,
        interface=(Interface.SCSI if arguments.bus == Bus.SCSI else Interface.VIRTIO).value,
        cache=arguments.cache,
        aio=arguments.aio,
        read_only=arguments.read_only,
        discard=not arguments.no_discard,
        serial=arguments.serial or "",
    )
