"""The specs of this node's instances, and the other files of each: reading, writing, renaming them.

Each function raises :class:`InstanceError` for what the system refuses, with its reason. A write
that fails leaves what was there.
"""

from __future__ import annotations

import grp
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from brine.common import operation, paths
from brine.common.errors import BrineError, nearest, root_hint
from brine.common.files import (
    put_aside,
    read_regular,
    second_name,
    sync_folder,
    try_to_write,
    unfinished,
    write_whole,
)
from brine.common.locks import locked
from brine.common.own_node import noted_node
from brine.instance.spec_cache import SpecCache, mark_of
from brine.vm.disk import without_empty
from brine.vm.files import InstanceFiles
from brine.vm.instances import READERS, instance_names, started_with
from brine.vm.markers import (
    MarkerKind,
    clear_way,
    file_of,
    make_shared_folder,
    remove_marker,
    this_run,
    write_marker,
)
from brine.vm.run import Run
from brine.vm.spec import (
    VERSION,
    AdminState,
    Source,
    Spec,
    SpecError,
    parse,
    to_json,
    with_unknown,
)
from brine.vm.stored_spec import (
    NEWER_VERSION,
    UnusableSpecError,
    has_newer_keys,
    read_spec,
    usable_as,
)
from brine.vm.values import vm_name_fault

LOCK_TIMEOUT_S = 10.0

_KEY = "instance/"
_MODE = 0o640
_LEAST_BYTES = 16 * 1024
_GROUP = "brine"
_NEWER_KEYS = ("owner", "ignored", "slice", "claim_serial")
_CONTROL_MODE = 0o2770
_OF_LAST_RUN = (
    MarkerKind.SHUTDOWN,
    MarkerKind.REBOOT,
    MarkerKind.ASKED,
    MarkerKind.FAILURE,
    MarkerKind.AWAITS,
)
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


class DamagedSpecError(InstanceError):
    """An instance whose spec is damaged."""


class KeptOutError(InstanceError):
    """An instance that an operation keeps for itself until it has ended, such as a move."""


@contextmanager
def telling(name: str, what: str, *, hint: str = "be root") -> Iterator[None]:
    """Turn an OSError in the block into an error of an instance.

    :param what: the failed operation: ``FILE: can't be read``.
    :param hint: for a user without the permission.
    """
    try:
        yield
    except OSError as error:
        may_not = isinstance(error, PermissionError)
        text = f"{what}: {error.strerror}"
        raise InstanceError(name, text, hint=hint if may_not else None) from error


def system_error(name: str, error: OSError) -> InstanceError:
    """The error of an instance for which the system has refused something."""
    text = f"{error.filename or 'the system'}: {error.strerror}"
    return InstanceError(name, text, hint=root_hint(error))


def spec_file_of(name: str) -> Path:
    """The file of an instance's spec."""
    if fault := vm_name_fault(name):
        raise InstanceError(name or "''", fault)
    return InstanceFiles(name).spec


def refuse_existing(name: str) -> None:
    if spec_file_of(name).exists():
        hint = f"give another name, or brine instance undefine {name}"
        raise InstanceError(name, "there is an instance of that name already", hint=hint)


def load(name: str) -> Spec:
    """The spec of an instance.

    :raises NoSpecError: if there is none; DamagedSpecError if it can't be used.
    """
    file = spec_file_of(name)
    try:
        return _parse(name, file)
    except FileNotFoundError:
        hint = nearest(name, names()) if names() else "brine instance define FILE makes one"
        raise NoSpecError(name, "there is no such instance", hint=hint) from None


def load_sound(name: str) -> Spec | None:
    """The spec of an instance; None if there is none, or it is damaged."""
    with suppress(FileNotFoundError, DamagedSpecError):
        return _parse(name, spec_file_of(name))
    return None


def started_as(name: str) -> Spec | None:
    """The spec of an instance's last start, down if it was stopped since; None if not known."""
    try:
        spec = parse(Spec, started_with(name))
    except (SpecError, ValueError, RecursionError):
        return None
    if not Run.last(name).was_stopped():
        return spec
    down, admin = AdminState.DOWN.value, Source.ADMIN.value
    return replace(spec, admin_state=down, admin_state_source=admin)


def names() -> list[str]:
    """The names of this node's instances."""
    return [name for name in instance_names() if not vm_name_fault(name)]


def load_all() -> Iterator[Spec | InstanceError]:
    """The specs of this node's instances, by name; an error for each that can't be used."""
    cache = SpecCache()
    for name in names():
        file = InstanceFiles(name).spec
        try:
            mark = mark_of(file)
            if (spec := cache.find(name, mark)) is None:
                spec = _read(name, file)
                cache.add(name, mark, spec)
            yield _usable(name, spec)
        except FileNotFoundError:
            continue  # it was undefined just now
        except InstanceError as error:
            yield error
    cache.write()


def save(spec: Spec) -> None:
    content = to_json(spec)
    for name in _NEWER_KEYS:
        # An older Brine, which may read it after a downgrade, does not know these keys.
        if not content[name]:
            del content[name]
    for name in ("disks", "nics"):
        content[name] = [without_empty(device) for device in content[name]]
    if spec.version == VERSION and has_newer_keys(content):
        content["version"] = NEWER_VERSION
    file = spec_file_of(spec.name)
    if spec.version > VERSION:  # what this version does not know stays
        with suppress(OSError, ValueError, RecursionError):
            content = with_unknown(content, json.loads(read_regular(file)))
    data = json.dumps(content, indent=2).encode() + b"\n"
    with telling(spec.name, f"{file}: can't be written"):
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_whole(file, data, mode=_MODE, group=group(), alone=True)


def try_files_of_start(spec: Spec) -> None:
    """See that what the next start of an instance writes can be written, before its present run is
    ended.

    :raises InstanceError: if it can't be.
    """
    files = InstanceFiles(spec.name)
    for file in (files.spec, files.runtime, file_of(MarkerKind.START, spec.name)):
        size = _LEAST_BYTES
        with suppress(OSError):
            size = max(size, 2 * file.stat().st_size)
        with telling(spec.name, f"{file}: could not be written by its next start"):
            try_to_write(file.parent, size)


def try_to_save(spec: Spec, name: str) -> None:
    """See that a spec can be saved under another name, before anything is done for that."""
    with telling(spec.name, f"{spec_file_of(name)}: can't be written"):
        try_to_write(paths.SPECS_DIR, len(json.dumps(to_json(spec), indent=2)) + _LEAST_BYTES)


def switch(name: str, new_name: str) -> None:
    """Rename the file of a spec in one step: at any time exactly one of both names exists.

    The content has the old name until the spec is saved under its new name.
    """
    file, renamed = spec_file_of(name), spec_file_of(new_name)
    with telling(name, f"{file}: can't be renamed"):
        os.rename(file, renamed)
        sync_folder(file.parent)


def remove(name: str) -> None:
    file = spec_file_of(name)
    with telling(name, "can't be removed"):
        file.unlink(missing_ok=True)
        unfinished(file).unlink(missing_ok=True)
        sync_folder(file.parent)


def keep_aside(name: str) -> Path:
    """Give a damaged spec a second name, before it is replaced; returns that name."""
    file = spec_file_of(name)
    with telling(name, f"{file}: can't be kept aside"):
        return second_name(file, file.with_name(f"{name}.damaged"))


def operation_key(name: str) -> str:
    """The key of operations on an instance; see :mod:`brine.common.operation`."""
    return f"{_KEY}{name}"


def settle_instance(name: str) -> None:
    """Complete or undo interrupted operations on an instance, whose lock the caller does not hold.

    :raises brine.common.operation.OperationError: if that can't be done now.
    """
    operation.settle(operation_key(name))


@contextmanager
def alone(name: str, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock of an instance, which all changes of its spec need. Interrupted operations on
    it are completed or undone before.

    :raises KeptOutError: if an operation keeps others out until it has ended.
    :raises brine.common.locks.LockedError: if another process holds it all that time.
    :raises brine.common.operation.OperationError: if an operation can't be settled now.
    """
    while True:
        with held(name, timeout_s=timeout_s):
            refuse_kept_out(name)
            if not _interrupted(name):
                yield
                return
        settle_instance(name)


def _interrupted(name: str) -> list[operation.Operation]:
    """The operations that are completed or undone before others begin; not those of other nodes."""
    found = operation.interrupted(operation_key(name))
    return [one for one in found if not operation.awaited(one)]


def refuse_kept_out(name: str) -> None:
    """Refuse to work on an instance that an operation keeps for itself until it has ended.

    :raises KeptOutError: which one.
    """
    if record := operation.obstacle(operation_key(name)):
        hint = "brine operations list shows how far that is"
        raise KeptOutError(name, record.keeps_out, hint=hint)


@contextmanager
def all_held(keys: Iterable[str]) -> Iterator[None]:
    """Hold the locks of the instances with these keys."""
    with ExitStack() as stack:
        for key in sorted(keys):
            stack.enter_context(held(key.removeprefix(_KEY)))
        yield


@contextmanager
def held(name: str, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock of an instance, with whatever was interrupted; see :func:`alone`."""
    spec_file_of(name)
    with ExitStack() as stack:
        with telling(name, "can't be locked"):
            paths.LOCK_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock = paths.LOCK_DIR / f"instance-{name}.lock"
            stack.enter_context(locked(lock, timeout_s=timeout_s))
        yield


def _parse(name: str, file: Path) -> Spec:
    return _usable(name, _read(name, file))


def _usable(name: str, spec: Spec) -> Spec:
    try:
        return usable_as(name, spec)
    except UnusableSpecError as error:
        raise DamagedSpecError(name, str(error), hint=_ANEW) from error


def _read(name: str, file: Path) -> Spec:
    try:
        return read_spec(file)
    except UnusableSpecError as error:
        raise DamagedSpecError(name, str(error), hint=_ANEW) from error
    except FileNotFoundError:
        raise
    except OSError:
        with telling(name, f"{file}: can't be read", hint=READERS):
            raise


def group() -> int | None:
    """The id of the group that may read specs; None if there is no such group."""
    try:
        return grp.getgrnam(_GROUP).gr_gid
    except KeyError:
        return None


# The files of an instance beside its spec. They are made before the spec and removed after it. So a
# command that is killed half-way may leave files without an instance, but never an instance without
# its files.


def forget(name: str) -> None:
    """Remove all files of an instance that does not run, except its spec."""
    control = InstanceFiles(name)
    try:
        # Other programs may have put something in the place of the first two, which are for them.
        for file in (control.shutdown, control.stopping, control.console_pipe, *_files(name)):
            clear_way(file)
        for file in (control.runtime, control.uefi_variables):
            unfinished(file).unlink(missing_ok=True)
    except OSError as error:
        text = f"{error.filename}: can't be removed: {error.strerror}"
        raise InstanceError(name, text) from error


def share(name: str, new_name: str) -> None:
    """Link the files of an instance to another name, and remove other files of that name."""
    forget(new_name)  # of one that had this name before
    folders = set[Path]()
    for file, renamed in zip(_files(name), _files(new_name), strict=True):
        with telling(name, f"{file}: can't be renamed"), suppress(FileNotFoundError):
            os.link(file, renamed, follow_symlinks=False)
            folders.add(renamed.parent)
    for folder in folders:  # before the spec is renamed: the former names are removed then
        with telling(name, f"{folder}: can't be written"):
            sync_folder(folder)


def clear_last_run(name: str) -> None:
    """Remove the leftovers of an instance's last run, and mark the beginning of the next by this
    process, which becomes QEMU. Raises OSError."""
    control = InstanceFiles(name)
    folder = paths.CONTROL_DIR
    if not folder.is_dir():
        make_shared_folder(folder, group=paths.CONTROL_GROUP, mode=_CONTROL_MODE)
    control.unit.parent.mkdir(mode=0o700, exist_ok=True)
    for file in (*control.sockets(), control.stopping, control.shutdown):
        clear_way(file)
    # The domain file of the last run must not survive, even if this start fails.
    control.domain.unlink(missing_ok=True)
    write_marker(MarkerKind.START, name, run=this_run(), pid=os.getpid())
    for kind in _OF_LAST_RUN:
        remove_marker(kind, name)


def note_unbegun_run(name: str, run: str) -> None:
    """Mark that an instance's next run was called off before its first program began. Without this,
    what follows would be said of the run before. Raises OSError."""
    write_marker(MarkerKind.START, name, run=run)
    remove_marker(MarkerKind.FAILURE, name)


def _files(name: str) -> list[Path]:
    """The files that a rename keeps."""
    files = InstanceFiles(name)
    markers = [file_of(kind, name) for kind in MarkerKind]
    logs = [files.console_log, files.previous_console_log]
    return [*markers, files.runtime, files.domain, files.uefi_variables, *logs]


# The instances of other nodes, and the cluster.

ELSEWHERE = "do that on its node; or leave out node, or change it, if it is to move here"


def is_here(spec: Spec) -> bool:
    """Whether a spec names this node, or none. A short name matches the full name. A host that was
    renamed is still its node."""
    return not spec.node or is_this_node(spec.node)


def is_this_node(name: str) -> bool:
    """Whether a node's name is this node's."""
    if _is_same_host(name, os.uname().nodename):
        return True
    noted = noted_node()
    return noted is not None and _is_same_host(name, noted.name)


def _is_same_host(said: str, here: str) -> bool:
    said, here = said.lower(), here.lower()
    return said in (here, here.partition(".")[0]) or here == said.partition(".")[0]


def cluster_name() -> str:
    """The name of the cluster; empty where there is none."""
    if not (paths.SSCONF_DIR / "ssconf_cluster_name").exists():
        return ""
    from brine.config.ssconf import Ssconf, SsconfError  # it takes long to load

    try:
        return Ssconf().cluster_name()
    except SsconfError:
        return ""


# Runtime files that could not be used, and are kept under other names for people.


def asides_of(name: str) -> frozenset[Path]:
    """The runtime files that are kept aside of an instance."""
    try:
        files = os.listdir(paths.RUNTIME_DIR)
    except OSError:
        return frozenset()
    ours = re.compile(rf"{re.escape(name)}\.aside(-\d+)?")
    return frozenset(paths.RUNTIME_DIR / one for one in files if ours.fullmatch(one))


def keep_runtime_aside(name: str) -> Path:
    """Give a runtime file a new name, and return that."""
    file = InstanceFiles(name).runtime
    aside = file.with_name(f"{name}.aside")
    try:
        return put_aside(file, aside)
    except OSError as error:
        text = f"{file}: can't be kept aside: {error.strerror}"
        are_many = isinstance(error, FileExistsError)
        hint = f"remove those that are not needed: {aside}*" if are_many else None
        raise InstanceError(name, text, hint=hint) from error
