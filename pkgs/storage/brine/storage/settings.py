"""The settings of ``/etc/brine/storage.toml``; see brine-storage.toml(5)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError, die
from brine.common.settings import SettingsError, load, setting
from brine.vm.values import is_folder_unit, unit_fault

_PROGRAM = "brine-storage"
_SYSTEM_FOLDERS = (
    *(
        "/bin",
        "/boot",
        "/dev",
        "/etc",
        "/home",
        "/lib",
        "/lib32",
        "/lib64",
        "/libx32",
        "/lost+found",
    ),
    *("/proc", "/root", "/run", "/sbin", "/sys", "/tmp", "/usr"),
    *("/var/backups", "/var/cache", "/var/lib/apt", "/var/lib/brine", "/var/lib/dpkg"),
    *("/var/lib/rpm", "/var/lib/systemd", "/var/local", "/var/lock", "/var/log", "/var/mail"),
    *("/var/run", "/var/spool", "/var/tmp"),
)
_WITH_OTHERS = ("/", "/var", "/var/lib", "/srv", "/mnt", "/media", "/opt")
"""Folders that have folders of others in them, too."""


def folder_fault(path: str) -> str | None:
    """Why a folder can't be a storage unit by its name; None if it can."""
    if not path.startswith("/"):
        return "must be an absolute path"
    if not path.isprintable() or len(path) > 1024:
        return "must be printable, and at most 1024 characters"
    parts = path.split("/")[1:]
    if path != "/" and any(part in ("", ".", "..") for part in parts):
        return "must be written without //, . and .., and without / at its end"
    if path in _WITH_OTHERS or any(is_within(path, one) for one in _SYSTEM_FOLDERS):
        return "is a folder of the system; take one of its own, such as /srv/vms"
    return None


def is_within(path: str, folder: str) -> bool:
    """Whether a path is a folder, or below it, by its name."""
    return path == folder or path.startswith(f"{folder}/")


def _name_fault(path: str) -> str | None:
    fault = folder_fault(path)
    return fault and f"{path}: {fault}"


@dataclass(frozen=True)
class StorageSettings:
    """The settings of a node's storage, each with its default."""

    directories: tuple[str, ...] = setting((), check=_name_fault)
    """The folders that are storage units of the type file."""

    default_unit: str = setting("", check=lambda text: unit_fault(text) if text else None)
    """The unit of new disks that name none: a volume group, or one of the folders."""


def load_settings() -> StorageSettings:
    """The settings of this node.

    :raises SettingsError: if they are not good.
    """
    return checked(load(StorageSettings, settings_file()))


def checked(settings: StorageSettings) -> StorageSettings:
    """Settings that are good.

    :raises SettingsError: if two folders share files, or the default unit is an unknown folder.
    """
    for one, other in combinations(settings.directories, 2):
        if is_within(one, other) or is_within(other, one):
            text = f"{one} and {other} are the same folder, or one is in the other"
            raise SettingsError(settings_file(), text, key="directories")
    default = settings.default_unit
    if is_folder_unit(default) and default not in settings.directories:
        text = f"{default} is none of the directories"
        raise SettingsError(settings_file(), text, key="default_unit")
    return settings


def settings_file() -> Path:
    return paths.settings_file("storage")


def main() -> None:
    """Check the file that is named on the command line, before it is put in place."""
    file = Path(sys.argv[1] if len(sys.argv) == 2 else "")
    try:
        checked(load(StorageSettings, file, required=True))
    except BrineError as error:
        die(_PROGRAM, error, 1)


if __name__ == "__main__":
    main()
