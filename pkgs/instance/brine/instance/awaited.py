"""A run that takes over the guest of another node's QEMU: what its start needs of that.

Who moves an instance notes it here, and starts the instance's unit. The note is for one start,
which takes it away; and only for an instance that is another node's by its claim. So whatever is
killed, no other start makes a QEMU that waits, and none is made once the guest is this node's.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from brine.common.files import read_regular, write_whole
from brine.instance.kvm.runtime_devices import spec_now
from brine.instance.store import InstanceError, is_here, telling
from brine.vm.files import InstanceFiles
from brine.vm.markers import MarkerKind, file_of, remove_marker
from brine.vm.runtime_file import Runtime, RuntimeFileError
from brine.vm.spec import Spec

_FOLDER_MODE = 0o700
_MODE = 0o600


class AwaitedGuest(NamedTuple):
    """A guest that comes from another node.

    :param spec: what it runs with there, with the paths of this node; the claim is the stored
        spec's.
    :param runtime: its runtime file there, with the paths of this node.
    """

    spec: Spec
    runtime: Runtime


def note_awaited(name: str, runtime: Runtime) -> None:
    """Have the next start of an instance wait for a guest.

    :param runtime: the runtime file of the QEMU that has it, with the paths of this node.
    """
    file = InstanceFiles(name).awaited
    with telling(name, f"{file}: can't be written"):
        file.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        content = json.dumps(runtime.content()).encode() + b"\n"
        write_whole(file, content, mode=_MODE, alone=True)


def has_arrived(name: str) -> None:
    """Have the run of an instance, whose QEMU has the guest, be as any other from now on."""
    file = file_of(MarkerKind.AWAITS, name)
    with telling(name, f"{file}: can't be removed"):
        remove_marker(MarkerKind.AWAITS, name)


def forget_awaited(name: str) -> None:
    """Have no start of an instance wait for a guest."""
    file = InstanceFiles(name).awaited
    with telling(name, f"{file}: can't be removed"), suppress(FileNotFoundError):
        file.unlink()


def take_awaited(spec: Spec) -> AwaitedGuest | None:
    """The guest that this start of an instance waits for; None if it begins anew. The caller holds
    the instance's lock.

    :param spec: the stored one.
    :raises InstanceError: if what was noted can't be used.
    """
    file = InstanceFiles(spec.name).awaited
    data: Any = None
    with telling(spec.name, f"{file}: can't be read"), suppress(FileNotFoundError):
        data = read_regular(file)
    if data is None:
        return None
    forget_awaited(spec.name)
    if is_here(spec):
        return None
    try:
        runtime = Runtime.of(json.loads(data), InstanceFiles(spec.name).runtime)
    except (ValueError, RecursionError, RuntimeFileError) as error:
        raise InstanceError(spec.name, f"{file}: is damaged: {error}") from error
    now = spec_now(spec.name, runtime)
    if now.uuid != spec.uuid:
        raise InstanceError(spec.name, f"{file}: is of another instance, {now.uuid}")
    return AwaitedGuest(replace(now, node=spec.node, claim_serial=spec.claim_serial), runtime)
