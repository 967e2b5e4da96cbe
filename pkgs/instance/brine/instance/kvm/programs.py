"""The programs that root runs for a VM: who may change them, and what QEMU says of itself."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from brine.common.files import fault_of_writers, open_regular
from brine.common.process import run_bounded
from brine.instance.store import InstanceError
from brine.vm.spec import MACHINE_VERSIONS, UEFI, Spec, SpecError

_VERSION = re.compile(r"version (\d+)\.(\d+)")
_ALIAS = re.compile(r"^(\S+) .*\(alias of ([A-Za-z0-9.-]+)\)", re.MULTILINE)
_ANSWER_TIMEOUT_S = 20
# It is asked while the instance is locked, and other commands wait 10 s for that lock.
_MACHINES_TIMEOUT_S = 5
# Of QEMU's -netdev, and of xl.cfg(5).
_SCRIPT = re.compile(r"""(?:script|bootloader|device_model_override)\s*=\s*["']?(/[^\s,"']+)""")
_NOBODY = 65534


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
    """The version of a spec's QEMU."""
    try:
        said = _answer_of(spec, "--version")
    except OSError as error:
        hint = f"chmod o+rx {spec.qemu}" if isinstance(error, PermissionError) else None
        fault = error.strerror or str(error)
        raise InstanceError(spec.name, f"{spec.qemu}: {fault}", hint=hint) from error
    if match := _VERSION.search(said):
        return int(match[1]), int(match[2])
    raise InstanceError(spec.name, f"{spec.qemu} does not say its version")


def _answer_of(spec: Spec, *question: str, timeout_s: float = _ANSWER_TIMEOUT_S) -> str:
    """What QEMU prints of itself, asked as a user without any privileges. Raises OSError."""
    # By a descriptor: that user need not be able to enter the program's folder.
    descriptor = open_regular(spec.qemu)
    how: dict[str, Any] = {"pass_fds": (descriptor,)}
    if os.geteuid() == 0:
        how |= {"user": _NOBODY, "group": _NOBODY, "extra_groups": ()}
    try:
        command = [f"/proc/self/fd/{descriptor}", *question]
        return run_bounded(command, timeout_s=timeout_s, environment=os.environ, **how).stdout
    finally:
        os.close(descriptor)
