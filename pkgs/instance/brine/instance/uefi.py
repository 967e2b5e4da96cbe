"""Which UEFI firmware a machine starts with, out of those that this node has.

Packages of firmware bring a descriptor of each image. Source: QEMU's docs/interop/firmware.json,
which also says which descriptor comes before which.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brine.common.regular_file import read_regular
from brine.instance.spec import Spec
from brine.instance.spec_files import InstanceError

FOLDERS = (Path("/etc/qemu/firmware"), Path("/usr/share/qemu/firmware"))
"""Of descriptors; a file in an earlier one stands in the place of that of its name in a later."""

_SUFFIX = ".json"
# What takes another machine than a spec describes, or keys that a guest need not know.
_UNWANTED = {"requires-smm", "enrolled-keys", "amd-sev-es-only", "intel-tdx", "amd-sev-snp"}
_VERSIONED = {"pc": "pc-i440fx-", "q35": "pc-q35-"}


@dataclass(frozen=True, slots=True)
class Uefi:
    """A firmware in two parts.

    :param code: the program, which all instances share.
    :param variables: what the other part, of which each instance has its own, begins as.
    """

    code: Path
    variables: Path


def find_uefi(spec: Spec) -> Uefi:
    """The firmware for a machine: of those that fit it the first one without Secure Boot's needs.

    :raises InstanceError: if the node has none.
    """
    for file in _descriptors():
        try:
            found = _fitting(spec, json.loads(read_regular(file)))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # of another's making, and others may do
        if found and found.code.exists() and found.variables.exists():
            return found
    folders = " and ".join(map(str, FOLDERS))
    raise InstanceError(
        spec.name,
        f"this node has no UEFI firmware for the machine {spec.machine}: none of {folders}",
        hint="apt install ovmf, or have its spec name a firmware's image",
    )


def _descriptors() -> Iterator[Path]:
    """By name, whatever folder they are in. An empty one only hides that of its name."""
    first: dict[str, Path] = {}
    for folder in FOLDERS:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            if name.endswith(_SUFFIX):
                first.setdefault(name, folder / name)
    yield from (first[name] for name in sorted(first))


def _fitting(spec: Spec, descriptor: dict[str, Any]) -> Uefi | None:
    """The firmware that a descriptor is of; None if it is not for this machine."""
    mapping = descriptor["mapping"]
    is_split = mapping["device"] == "flash" and mapping.get("mode", "split") == "split"
    if "uefi" not in descriptor["interface-types"] or not is_split:
        return None
    if _UNWANTED & set(descriptor["features"]):
        return None
    if not any(_is_for(spec, target) for target in descriptor["targets"]):
        return None
    parts = (mapping["executable"], mapping["nvram-template"])
    if any(part["format"] != "raw" for part in parts):
        return None
    code, variables = (Path(part["filename"]) for part in parts)
    return Uefi(code, variables)


def _is_for(spec: Spec, target: dict[str, Any]) -> bool:
    architecture = Path(spec.qemu).name.removeprefix("qemu-system-")
    # A program of another name, such as kvm, is for the node's own kind of processor.
    if architecture == Path(spec.qemu).name:
        architecture = os.uname().machine
    # Whatever a machine's newest version is called, it is one.
    machine = f"{_VERSIONED[spec.machine]}0" if spec.machine in _VERSIONED else spec.machine
    is_machine = any(fnmatch.fnmatchcase(machine, pattern) for pattern in target["machines"])
    return bool(target["architecture"] == architecture and is_machine)
