"""The specs of this node's instances, a file each."""

from __future__ import annotations

import contextlib
import errno
import grp
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.aside import second_name
from brine.common.errors import BrineError
from brine.common.locks import locked
from brine.common.nearest import nearest
from brine.common.regular_file import read_regular
from brine.common.wholefile import sync_folder, unfinished, write_whole
from brine.instance.checks import name_fault
from brine.instance.schema import SpecError, known_part, parse, to_json, with_unknown
from brine.instance.spec import VERSION, Spec

FOLDER = paths.SPECS_DIR
LOCK_TIMEOUT_S = 10.0

_MODE = 0o640
_GROUP = "brine"
_ANEW = "brine instance define writes it anew, and keeps this one aside"


class InstanceError(BrineError):
    """An instance that can't be worked on.

    :param name: of the instance.
    """

    def __init__(self, name: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{name}: {message}", hint=hint)
        self.name = name


class NoSpecError(InstanceError):
    """An instance that has no spec: there is none, or its spec was removed while it ran."""


class DamagedError(InstanceError):
    """An instance whose spec is no spec."""


def file_of(name: str) -> Path:
    """Where the spec of an instance is.

    :raises InstanceError: if it can't be the name of one.
    """
    if fault := name_fault(name):
        raise InstanceError(name or "''", fault)
    return FOLDER / f"{name}.json"


def load(name: str) -> Spec:
    """The spec of an instance.

    :raises NoSpecError: if there is none.
    :raises InstanceError: if it can't be used.
    """
    file = file_of(name)
    try:
        return _parse(name, file)
    except FileNotFoundError:
        hint = nearest(name, names()) if names() else "brine instance define FILE makes one"
        raise NoSpecError(name, "there is no such instance", hint=hint) from None


def load_sound(name: str) -> Spec | None:
    """The spec of an instance; None if there is none, or it is damaged.

    :raises InstanceError: if it can't be read.
    """
    try:
        return _parse(name, file_of(name))
    except (FileNotFoundError, DamagedError):
        return None


def names() -> list[str]:
    """The names of this node's instances.

    :raises BrineError: if they can't be read.
    """
    try:
        files = os.listdir(FOLDER)
    except FileNotFoundError:
        return []
    except OSError as error:
        hint = "be root, or in the group brine" if isinstance(error, PermissionError) else None
        raise BrineError(f"{FOLDER}: can't be read: {error.strerror}", hint=hint) from error
    stems = [file.removesuffix(".json") for file in files if file.endswith(".json")]
    return sorted(stem for stem in stems if not name_fault(stem))


def load_all() -> Iterator[Spec | InstanceError]:
    """The specs of this node's instances, by name; what is wrong, where one can't be used."""
    for name in names():
        try:
            yield _parse(name, FOLDER / f"{name}.json")
        except FileNotFoundError:
            continue  # it was undefined just now
        except InstanceError as error:
            yield error


def save(spec: Spec) -> None:
    """Write a spec.

    :raises InstanceError: if that fails; what was there is as it was.
    """
    content = _kept(spec) if spec.version > VERSION else to_json(spec)
    data = json.dumps(content, indent=2).encode() + b"\n"
    try:
        FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_whole(file_of(spec.name), data, mode=_MODE, group=group(), alone=True)
    except OSError as error:
        hint = "be root" if isinstance(error, PermissionError) else None
        text = f"{file_of(spec.name)}: can't be written: {error.strerror}"
        raise InstanceError(spec.name, text, hint=hint) from error


def switch(name: str, new_name: str) -> None:
    """Have the spec of one name be that of another, in one step: there is one of both at any time.

    It still says its old name inside, until it is saved by the new one.

    :raises InstanceError: if that fails; then nothing has changed.
    """
    file, renamed = file_of(name), file_of(new_name)
    try:
        os.rename(file, renamed)
        sync_folder(FOLDER)
    except OSError as error:
        raise InstanceError(name, f"{file}: can't be renamed: {error.strerror}") from error


def name_inside(name: str) -> str | None:
    """The name that a spec says itself, which was its own before a rename that was interrupted;
    None if there is no sound spec."""
    try:
        return _read(name, file_of(name)).name
    except (FileNotFoundError, InstanceError):
        return None


def renamed_from(old_name: str) -> str | None:
    """The instance that says that name inside and has another one now; None if there is none."""
    said = json.dumps(old_name).encode()
    for name in names():
        try:
            # Not all of them are taken apart: there may be hundreds.
            mentions = name != old_name and said in read_regular(FOLDER / f"{name}.json")
        except OSError:
            continue
        if mentions and name_inside(name) == old_name:
            return name
    return None


def remove(name: str) -> None:
    """Forget an instance.

    :raises InstanceError: if that fails.
    """
    try:
        file = file_of(name)
        file.unlink(missing_ok=True)
        unfinished(file).unlink(missing_ok=True)
        sync_folder(FOLDER)
    except OSError as error:
        raise InstanceError(name, f"can't be removed: {error.strerror}") from error


def keep_aside(name: str) -> Path:
    """Give a damaged spec a second name, as another is about to take its place; returns that.

    :raises InstanceError: if that fails.
    """
    file = file_of(name)
    try:
        return second_name(file, file.with_name(f"{name}.damaged"))
    except OSError as error:
        raise InstanceError(name, f"{file}: can't be kept aside: {error.strerror}") from error


@contextlib.contextmanager
def alone(name: str, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Be the only one who changes an instance's spec.

    :raises brine.common.locks.LockedError: if somebody else does all that time.
    :raises InstanceError: if it can't be had.
    """
    file_of(name)
    with contextlib.ExitStack() as stack:
        try:
            paths.LOCK_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock = paths.LOCK_DIR / f"instance-{name}.lock"
            stack.enter_context(locked(lock, timeout_s=timeout_s))
        except OSError as error:
            hint = "be root" if isinstance(error, PermissionError) else None
            raise InstanceError(name, f"can't be locked: {error.strerror}", hint=hint) from error
        yield


def _parse(name: str, file: Path) -> Spec:
    spec = _read(name, file)
    if spec.name != name:
        # Its file's name is the one that counts, or else it is a copy of another one.
        if (FOLDER / f"{spec.name}.json").exists():
            raise DamagedError(name, f"{file}: is the spec of {spec.name}", hint=_ANEW)
        spec = replace(spec, name=name)
    if not _is_whole(spec):
        raise DamagedError(name, f"{file}: lacks UUIDs or MAC addresses", hint=_ANEW)
    return spec


def _read(name: str, file: Path) -> Spec:
    try:
        data = json.loads(read_regular(file))
        if _is_newer(data):
            data = known_part(Spec, data)
        return parse(Spec, data)
    except FileNotFoundError:
        raise
    except OSError as error:
        text = f"{file}: can't be read: {error.strerror}"
        if error.errno in (errno.EINVAL, errno.ENXIO):  # it is no file, and will never be a spec
            raise DamagedError(name, text, hint=_ANEW) from error
        hint = "be root, or in the group brine" if isinstance(error, PermissionError) else None
        raise InstanceError(name, text, hint=hint) from error
    except (SpecError, ValueError, RecursionError) as error:
        raise DamagedError(name, f"{file}: {error}", hint=_ANEW) from error


def _is_newer(data: Any) -> bool:
    """Whether a newer Brine wrote a spec, with keys that this one may not know."""
    version = data.get("version") if isinstance(data, dict) else None
    return type(version) is int and version > VERSION


def _kept(spec: Spec) -> dict[str, Any]:
    """A newer spec with what this Brine does not know of it."""
    try:
        return with_unknown(Spec, to_json(spec), json.loads(read_regular(file_of(spec.name))))
    except (OSError, ValueError, RecursionError):
        return to_json(spec)


def _is_whole(spec: Spec) -> bool:
    """Whether it has what a definition fills in. Somebody may have written it by hand."""
    has_macs = all(nic.uuid and nic.mac for nic in spec.nics)
    return bool(spec.uuid) and has_macs and all(disk.uuid for disk in spec.disks)


def group() -> int | None:
    """The id of the group that may read specs; None if there is no such group."""
    try:
        return grp.getgrnam(_GROUP).gr_gid
    except KeyError:
        return None
