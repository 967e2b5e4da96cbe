"""UEFI: the firmware of a machine, and the variables of each instance, made from a template."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.errors import install_hint
from brine.common.files import read_regular, write_whole
from brine.instance.store import InstanceError, telling
from brine.vm.files import InstanceFiles
from brine.vm.spec import MACHINE_VERSIONS, Spec

_MODE = 0o600

FOLDERS = (Path("/etc/qemu/firmware"), Path("/usr/share/qemu/firmware"))
"""Folders of firmware descriptors; a file in an earlier folder replaces one of its name in a
later."""

# Features that need another machine than a spec describes, or that need enrolled keys.
_UNWANTED = {"requires-smm", "enrolled-keys", "amd-sev-es-only", "intel-tdx", "amd-sev-snp"}


def find_uefi(spec: Spec) -> tuple[Path, Path]:
    """The first firmware that fits a machine and does not need Secure Boot: its program, and the
    template of its variables."""
    files: dict[str, Path] = {}
    for folder in reversed(FOLDERS):
        with contextlib.suppress(OSError):
            files |= {name: folder / name for name in os.listdir(folder) if name.endswith(".json")}
    for _, file in sorted(files.items()):  # an empty file hides the one of its name
        try:
            found = _fitting(spec, json.loads(read_regular(file)))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # another program made it, and others may do
        if found and all(part.exists() for part in found):
            return found
    folders = " and ".join(map(str, FOLDERS))
    hint = install_hint(apt="ovmf", dnf="edk2-ovmf")
    raise InstanceError(
        spec.name,
        f"this node has no UEFI firmware for the machine {spec.machine}: none of {folders}",
        hint=f"{hint}, or have its spec name a firmware's image",
    )


def _fitting(spec: Spec, descriptor: dict[str, Any]) -> tuple[Path, Path] | None:
    """The firmware of a descriptor; None if it is not for this machine."""
    mapping = descriptor["mapping"]
    is_split = mapping["device"] == "flash" and mapping.get("mode", "split") == "split"
    if "uefi" not in descriptor["interface-types"] or not is_split:
        return None
    if _UNWANTED & set(descriptor["features"]):
        return None
    if not any(_is_for(spec, target) for target in descriptor["targets"]):
        return None
    code, variables = mapping["executable"], mapping["nvram-template"]
    if (code["format"], variables["format"]) != ("raw", "raw"):
        return None
    return Path(code["filename"]), Path(variables["filename"])


def _is_for(spec: Spec, target: dict[str, Any]) -> bool:
    program = Path(spec.qemu).name
    architecture = program.removeprefix("qemu-system-")
    # A QEMU of another name, such as kvm, emulates the node's own kind of processor.
    if architecture == program:
        architecture = os.uname().machine
    versions = MACHINE_VERSIONS.get(spec.machine)
    machine = f"{versions}0" if versions else spec.machine  # descriptors name all versions
    is_machine = any(fnmatch.fnmatchcase(machine, pattern) for pattern in target["machines"])
    return bool(target["architecture"] == architecture and is_machine)


@contextlib.contextmanager
def opened_variables(name: str, template: Path) -> Iterator[int]:
    """Open an instance's variables, for the time of the block, as a descriptor to read and write.

    :param template: the initial variables. Variables of another size belong to another firmware,
        and are refused.
    """
    file = InstanceFiles(name).uefi_variables
    with telling(name, f"{file}, or {template}: can't be used"):
        if not file.exists():
            paths.UEFI_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(file, read_regular(template), mode=_MODE, alone=True)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        size = template.stat().st_size
        descriptor = os.open(file, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise InstanceError(
                name,
                f"{file}: holds no variables of this firmware, which has {size} bytes of them",
                hint=f"move {file} away, and the next start makes new ones from {template}",
            )
        yield descriptor
    finally:
        os.close(descriptor)


def copy_variables(name: str, other: str) -> None:
    """Copy the UEFI variables of an instance, such as its boot order, to another, if there are
    any."""
    file = InstanceFiles(name).uefi_variables
    with telling(other, f"{file}: can't be copied"), contextlib.suppress(FileNotFoundError):
        variables = read_regular(file)
        write_whole(InstanceFiles(other).uefi_variables, variables, mode=_MODE, alone=True)
