"""What the kernel holds an instance to: limits of its unit's control group."""

from __future__ import annotations

from pathlib import Path

from brine.common.instance_units import unit_of
from brine.instance.spec import Spec
from brine.instance.spec_files import InstanceError
from brine.instance.unit import UnitError, set_properties

_KEYS = ("memory_max_mib", "cpu_limit_percent", "cpu_weight", "io_weight")
_SET_BEFORE = Path("/run/systemd/system.control")


def properties_of(spec: Spec) -> list[str]:
    """The properties of the unit that mean the limits of a spec (systemd.resource-control(5))."""
    wanted = {
        "MemoryMax": f"{spec.memory_max_mib}M" if spec.memory_max_mib else "infinity",
        "CPUQuota": f"{spec.cpu_limit_percent}%" if spec.cpu_limit_percent else "",
        "CPUWeight": str(spec.cpu_weight or ""),
        "IOWeight": str(spec.io_weight or ""),
    }
    return [f"{name}={value}" for name, value in wanted.items()]


def set_limits(spec: Spec) -> None:
    """Have systemd set the limits of the unit that this process is of, until the next boot.

    :raises InstanceError: if it does not.
    """
    has_limits = any(getattr(spec, name) for name in _KEYS)
    if not has_limits and not (_SET_BEFORE / f"{unit_of(spec.name)}.d").exists():
        return
    try:
        set_properties(spec.name, properties_of(spec))
    except UnitError as error:
        raise InstanceError(spec.name, f"its limits can't be set: {error}") from error
