"""The spec files of a node's instances, as each start reads them: a file is a spec as a whole, or
none."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from brine.common.errors import BrineError
from brine.common.files import read_regular
from brine.vm.files import InstanceFiles
from brine.vm.identities import rows_in
from brine.vm.instances import READERS, instance_names
from brine.vm.spec import VERSION, Spec, SpecError, known_part, parse
from brine.vm.values import vm_name_fault

NEWER_VERSION = 2
"""What the file of a spec says that has a claim, a filter, or a device that was added by hand: the
release before leaves out what it does not know of a spec of a newer version, and starts the
instance after a downgrade. A spec itself has version 1.
"""

_NEVER_A_SPEC = (errno.EINVAL, errno.ENXIO)


class UnusableSpecError(BrineError):
    """A file that is no spec with which an instance can start."""


def read_spec(file: Path) -> Spec:
    """The spec in a file, whatever instance it is of.

    :raises OSError: if it can't be read, and FileNotFoundError if there is none.
    :raises UnusableSpecError: if it is no spec.
    """
    try:
        return _spec_of(read_regular(file))
    except OSError as error:
        if error.errno not in _NEVER_A_SPEC:
            raise
        raise UnusableSpecError(f"{file}: can't be read: {error.strerror}") from error
    except (SpecError, ValueError, RecursionError) as error:
        raise UnusableSpecError(f"{file}: {error}") from error


@lru_cache(maxsize=64)
def _spec_of(content: bytes) -> Spec:
    # A process reads a spec several times to see changes; mostly there are none.
    data: Any = json.loads(content)
    data = as_this_version(data)
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is int and version > VERSION:  # it may have keys that this Brine lacks
        data = known_part(Spec, data)
    return parse(Spec, data)


def as_this_version(data: Any) -> Any:
    """A spec as JSON, of which a file has that it is newer for the release before."""
    if isinstance(data, dict) and data.get("version") == NEWER_VERSION and has_newer_keys(data):
        return {**data, "version": VERSION}
    return data


def has_newer_keys(data: Any) -> bool:
    """Whether a spec as JSON has keys that the release before does not read."""
    devices = (row for key in ("disks", "nics") for row in rows_in(data, key))
    is_newer = any(row.get("by_hand") or row.get("filter") for row in devices)
    return bool(data.get("claim_serial")) or is_newer


def usable_as(name: str, spec: Spec) -> Spec:
    """What the file of an instance has, as the spec of that instance.

    :raises UnusableSpecError: if it is another one's, or not whole.
    """
    file = InstanceFiles(name).spec
    if spec.name != name:
        # The file's name counts, unless the file is a copy of another instance's.
        if InstanceFiles(spec.name).spec.exists():
            raise UnusableSpecError(f"{file}: is the spec of {spec.name}")
        spec = replace(spec, name=name)
    # A definition completes it; but it may have been written by hand.
    has_all_macs = all(nic.uuid and nic.mac for nic in spec.nics)
    if not (spec.uuid and has_all_macs and all(disk.uuid for disk in spec.disks)):
        raise UnusableSpecError(f"{file}: lacks UUIDs or MAC addresses")
    return spec


def stored_specs(*, but: str = "") -> tuple[list[Spec], dict[str, BrineError]]:
    """The specs of all spec files of this node; and, by name, why others can't be used.

    :param but: an instance that is left out.
    :raises BrineError: if the files can't be found out.
    """
    specs, faults = list[Spec](), dict[str, BrineError]()
    for name in instance_names():
        if name == but:
            continue
        file = InstanceFiles(name).spec
        try:
            if fault := vm_name_fault(name):
                raise UnusableSpecError(f"{file}: {fault}")
            specs.append(usable_as(name, read_spec(file)))
        except FileNotFoundError:
            continue  # it was undefined just now
        except OSError as error:
            hint = READERS if isinstance(error, PermissionError) else None
            faults[name] = BrineError(f"{file}: can't be read: {error.strerror}", hint=hint)
        except BrineError as error:
            faults[name] = error
    return specs, faults
