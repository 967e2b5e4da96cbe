"""The programs that root runs for a VM: who may change them, and what QEMU says of itself."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from brine.common import paths
from brine.common.files import fault_of_writers, open_regular, read_json, write_whole
from brine.common.process import begin_program
from brine.instance.store import InstanceError
from brine.vm.spec import MACHINE_VERSIONS, UEFI, Spec, SpecError

if TYPE_CHECKING:
    import subprocess

_VERSION = re.compile(r"version (\d+)\.(\d+)")
_ALIAS = re.compile(r"^(\S+) .*\(alias of ([A-Za-z0-9.-]+)\)", re.MULTILINE)
_ANSWER_TIMEOUT_S = 20
# It is asked while the instance is locked, and other commands wait 10 s for that lock.
_MACHINES_TIMEOUT_S = 5
# Of QEMU's -netdev, and of xl.cfg(5).
_SCRIPT = re.compile(r"""(?:script|bootloader|device_model_override)\s*=\s*["']?(/[^\s,"']+)""")
NOBODY = 65534
"""The user, and the group, without any privileges."""

_ELF = b"\x7fELF"
_NEW_S = 2.0
_MOST_NOTED = 16


def faults_of_writers(spec: Spec) -> Iterator[tuple[str, str]]:
    """The keys of a spec whose files users other than root may change, each with the reason.

    A start runs QEMU as root before it confines it, the firmware is the first program of the
    guest, and further arguments of QEMU's or lines of xl's may name scripts.
    """
    files = [] if spec.is_xen() else [("qemu", spec.qemu), ("firmware", spec.firmware)]
    for index, argument in enumerate(spec.extra_arguments):
        files += [(f"extra_arguments/{index}", file) for file in _SCRIPT.findall(argument)]
    for key, file in files:
        if file not in ("", UEFI) and (fault := fault_of_writers(file)):
            yield key, f"{file} is not run: {fault}"


def refuse_writers(spec: Spec) -> None:
    """Refuse a spec with a program that users other than root may change.

    :raises SpecError: which one, and why.
    """
    for key, fault in faults_of_writers(spec):
        raise SpecError(fault, where=f"/{key}")


def with_machine_version(spec: Spec) -> Spec:
    """The spec with the version of its machine type: ``pc`` becomes ``pc-i440fx-7.2``. So an
    upgrade of QEMU changes no guest's hardware.

    If QEMU can't be asked, the spec stays as it is: the steps of the start that follow say why.
    """
    if spec.machine not in MACHINE_VERSIONS or any(faults_of_writers(spec)):
        return spec
    try:
        listed = _answer_of(spec, "-machine", "help", timeout_s=_MACHINES_TIMEOUT_S)
    except OSError:
        return spec
    aliases = dict(_ALIAS.findall(listed))
    version = aliases.get(spec.machine, "")
    is_version = version.startswith(MACHINE_VERSIONS[spec.machine])
    return replace(spec, machine=version) if is_version else spec


def version_of(spec: Spec) -> tuple[int, int]:
    """The version of a spec's QEMU. QEMU is asked once and the answer noted, as it takes as long to
    load as a start takes to prepare all else."""
    try:
        identity = identity_of(spec.qemu)
        noted = _noted_versions()
        if identity in noted:
            return noted[identity]
        said = _answer_of(spec, "--version")
    except OSError as error:
        hint = f"chmod o+rx {spec.qemu}" if isinstance(error, PermissionError) else None
        fault = error.strerror or str(error)
        raise InstanceError(spec.name, f"{spec.qemu}: {fault}", hint=hint) from error
    match = _VERSION.search(said)
    if match is None:
        raise InstanceError(spec.name, f"{spec.qemu} does not say its version")
    version = int(match[1]), int(match[2])
    if identity:
        _note_versions({**noted, identity: version})
    return version


def identity_of(program: str) -> str:
    """What changes with a program: its file, size and times. Empty if its version may change
    without that: a script may run another program, and a file that has just been written may be
    written again at the same time. Raises OSError.
    """
    with os.fdopen(open_regular(program), "rb") as file:
        is_script = file.read(len(_ELF)) != _ELF
        status = os.fstat(file.fileno())
    is_new = abs(time.time() - status.st_ctime) < _NEW_S
    parts = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return "" if is_script or is_new else "-".join(map(str, parts))


def _noted_versions() -> dict[str, tuple[int, int]]:
    """The noted versions, by the identity of the program; none if others than root may have written
    them."""
    file = paths.QEMU_VERSIONS_FILE
    rows: Any = {} if fault_of_writers(file) else read_json(file)
    try:
        return {key: (int(major), int(minor)) for key, (major, minor) in rows.items()}
    except (AttributeError, TypeError, ValueError):
        return {}


def _note_versions(versions: Mapping[str, tuple[int, int]]) -> None:
    data = json.dumps(dict(list(versions.items())[-_MOST_NOTED:])).encode() + b"\n"
    with suppress(OSError):  # then it is asked again
        write_whole(paths.QEMU_VERSIONS_FILE, data, mode=0o600, durable=False)


def _answer_of(spec: Spec, *question: str, timeout_s: float = _ANSWER_TIMEOUT_S) -> str:
    """What a spec's QEMU prints of itself. Raises OSError."""
    return begin_unprivileged(spec.qemu, *question)(timeout_s).stdout


def begin_unprivileged(
    program: str,
    *arguments: str,
    descriptors: Sequence[int] = (),
    user: int = NOBODY,
    group: int = NOBODY,
    through: Sequence[str] = (),
) -> Callable[[float | None], subprocess.CompletedProcess[str]]:
    """Begin to run a QEMU without a guest, by root as a user without any privileges. The result
    waits for its end, as that of :func:`~brine.common.process.begin_program` does.

    :param descriptors: that it gets, under their numbers.
    :param through: a program that runs it.
    :raises OSError: if it can't be run.
    """
    # By a descriptor: that user need not be able to enter the program's folder.
    descriptor = open_regular(program)
    how: dict[str, Any] = {"pass_fds": (descriptor, *descriptors)}
    if os.geteuid() == 0:
        how |= {"user": user, "group": group, "extra_groups": ()}
    try:
        command = [*through, f"/proc/self/fd/{descriptor}", *arguments]
        return begin_program(command, environment=os.environ, **how)
    finally:
        os.close(descriptor)
