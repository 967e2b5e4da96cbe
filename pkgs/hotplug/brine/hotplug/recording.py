"""Keeping runtime files in step: whoever changes one has it alone from reading to writing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from brine.common.locks import LockedError, locked
from brine.hotplug.device_names import Kind
from brine.hotplug.lock_files import lock_of
from brine.hotplug.runtime import Runtime, RuntimeFileError, qemu_id

if TYPE_CHECKING:
    from brine.hotplug.pending import Pending

LOCK_TIMEOUT_S = 10.0
"""A change takes milliseconds."""


def change(
    file: Path, how: Callable[[Runtime], Runtime], *, timeout_s: float = LOCK_TIMEOUT_S
) -> bool:
    """Change a runtime file; False if it was so already, and is not written.

    :param how: makes of what the file has what it is to have.
    :param timeout_s: how long to wait for others who change it.
    :raises RuntimeFileError: if it can't be read, written or locked.
    """
    with _alone(file, timeout_s):
        old = Runtime.load(file)
        new = how(old)
        if new == old:
            return False
        new.save(file)
    return True


def record(pending: Pending, *, plugged: bool) -> None:
    """Have the runtime file say what is so.

    :raises RuntimeFileError: if it can't be read, written or locked.
    """
    if pending.runtime is None:
        return

    def how(runtime: Runtime) -> Runtime:
        if plugged:
            link = pending.device.get("path")
            return runtime.with_device(pending.kind, pending.device, link=link)
        gone = _uuid_of(pending, runtime)
        return runtime.without_device(pending.kind, gone) if gone else runtime

    change(Path(pending.runtime), how)


def is_recorded(file: Path | None, kind: Kind, uuid: str, device_id: str) -> bool:
    """Whether a runtime file has a device where it is plugged in, or there is no such file.

    :param device_id: QEMU's.
    :raises RuntimeFileError: if it can't be read.
    """
    if file is None:
        return True
    found = Runtime.load(file).find(kind, uuid)
    return found is not None and qemu_id(found) == device_id


def _uuid_of(pending: Pending, runtime: Runtime) -> str | None:
    """The UUID that the file has of a device that is gone."""
    devices = runtime.devices[pending.kind]
    by_id = [one["uuid"] for one in devices if qemu_id(one) == pending.device_id]
    # Of a device that somebody else plugged in only the beginning is known.
    by_uuid = [one["uuid"] for one in devices if one["uuid"].lower().startswith(pending.uuid)]
    return next((found[0] for found in (by_id, by_uuid) if len(found) == 1), None)


@contextlib.contextmanager
def _alone(file: Path, timeout_s: float) -> Iterator[None]:
    lock = lock_of("runtime", file)
    with contextlib.ExitStack() as stack:
        try:
            lock.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            stack.enter_context(locked(lock, timeout_s=timeout_s))
        except LockedError as error:
            raise RuntimeFileError(file, f"can't be locked: {error}", hint=error.hint) from error
        except OSError as error:
            hint = "be root" if isinstance(error, PermissionError) else None
            text = f"can't be locked: {lock}: {error.strerror}"
            raise RuntimeFileError(file, text, hint=hint) from error
        yield
