"""What of a spec can't be had from Xen: refused when it is defined, or nobody would."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Any

from brine.instance.schema import SpecError
from brine.instance.spec import NOT_CONFINED, Spec
from brine.instance.xen.configuration import DISK_KEYS, KEYS, MOST_DISKS, NIC_KEYS

# What becomes of an ended domain, and which one it is, others rely on.
_OURS = re.compile(r"(?:^|[;\n])\s*(name|uuid|type|on_\w+)\s*\+?=")


def check(spec: Spec) -> None:
    """Refuse a spec that asks Xen for what is QEMU's, or for what it can't do.

    :raises SpecError: what, and where.
    """
    _refuse_others(spec, KEYS, "", spec.hypervisor)
    for index, disk in enumerate(spec.disks):
        _refuse_others(disk, DISK_KEYS, f"/disks/{index}", spec.hypervisor)
    for index, nic in enumerate(spec.nics):
        _refuse_others(nic, NIC_KEYS, f"/nics/{index}", spec.hypervisor)
    if len(spec.disks) > MOST_DISKS:
        text = f"has {len(spec.disks)}, and a domain may have {MOST_DISKS}"
        raise SpecError(text, where="/disks")
    if not spec.kernel and not spec.disks:
        raise SpecError("must be there, where no disk has one", where="/kernel")
    for index, line in enumerate(spec.extra_arguments):
        if match := _OURS.search(line):
            text = f"{match[1]} can't be set: Brine does"
            raise SpecError(text, where=f"/extra_arguments/{index}")


def _refuse_others(value: Any, known: Collection[str], where: str, hypervisor: str) -> None:
    """Refuse what is set and not known."""
    for field in fields(value):
        default = NOT_CONFINED.get(field.name, field.default)
        is_default = default is not MISSING and getattr(value, field.name) == default
        if field.name not in known and not is_default:
            raise SpecError(
                f"means nothing to the hypervisor {hypervisor}",
                where=f"{where}/{field.name}",
                hint="leave it out; brine-spec(5) says what Xen knows",
            )
