"""Instances that can't be told apart: by their UUID, or on the network by a NIC's MAC address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brine.instance.other_specs import other_specs
from brine.instance.schema import SpecError
from brine.instance.spec import Spec

_HINT = 'leave out "uuid" and "mac" for new ones, or undefine {name}'


def refuse_twin(spec: Spec) -> None:
    """Refuse a spec that has the UUID or a MAC address of another instance, which is not offline.

    :raises SpecError: which, and whose it is.
    """
    for name, other in other_specs(spec.name):
        hint = _HINT.format(name=name)
        if spec.uuid == str(other.get("uuid")).lower():
            raise SpecError(f"is the UUID of {name}", where="/uuid", hint=hint)
        macs = _macs_of(other)
        for index, nic in enumerate(spec.nics):
            if nic.mac.lower() in macs:
                text = f"is the MAC address of {name}"
                raise SpecError(text, where=f"/nics/{index}/mac", hint=hint)


def _macs_of(data: Mapping[str, Any]) -> frozenset[str]:
    nics = data.get("nics")
    rows = nics if isinstance(nics, list) else []
    return frozenset(str(row.get("mac")).lower() for row in rows if isinstance(row, Mapping))
