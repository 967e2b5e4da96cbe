"""What every node knows of the cluster: one value a file, which needs no ``config.data`` to read.

Names and formats are Ganeti's: lists have one item a line, ``True`` and ``False`` are truth values.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.config import params
from brine.common.config.shape import ConfigError, shown
from brine.common.config.ssconf_values import HVPARAMS, SsconfError, export, one_line
from brine.common.uid_pool import UidPoolError, parse_uid_pool
from brine.common.wholefile import sync_folder, write_whole

__all__ = ["Ssconf", "SsconfError", "export", "pending", "write"]

_PREFIX = "ssconf_"
_TEMPORARY = ".ssconf-new-"
_LONGEST_WRITE_S = 3600
_KEY = re.compile(r"[a-z0-9_-]{1,64}")
_LARGEST = 16 << 20  # bytes


def write(folder: Path, values: Mapping[str, str]) -> list[str]:
    """Put *values* into the files of *folder*, each whole; a file that is right is left alone, and
    files of keys that we know and that have no value are removed. The folder is made, but not
    those above it.

    :return: the keys that changed, sorted.
    :raises SsconfError: if a file can't be written.
    :raises ConfigError: if the folder can't be made.
    """
    changed = pending(folder, values)
    if not changed:
        return changed
    key = changed[0]
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
        for key in changed:
            file = _file(folder, key)
            if key in values:
                data = _content(values[key])
                write_whole(file, data, mode=0o644, prefix=_TEMPORARY, folder_later=True)
            else:
                file.unlink(missing_ok=True)
        _clean_up(folder)
        sync_folder(folder)
    except OSError as error:
        raise SsconfError(key, f"can't be written in {folder}: {error.strerror}") from error
    return changed


def pending(folder: Path, values: Mapping[str, str]) -> list[str]:
    """The keys that :func:`write` would change, sorted.

    :raises ConfigError: if the folder could not be made.
    """
    if not os.path.isdir(folder.parent):
        hint = f"see whether the name is right; mkdir --parents {folder.parent} makes it"
        raise ConfigError(f"{folder}: there is no folder {folder.parent}", hint=hint)
    changed = [key for key in values if _bytes(folder, key) != _content(values[key])]
    if folder.is_dir():
        there = (file.name.removeprefix(_PREFIX) for file in folder.glob(f"{_PREFIX}*"))
        changed += [key for key in there if key not in values and key.startswith(HVPARAMS)]
    return sorted(changed)


class Ssconf:
    """Reads the values of a folder.

    Each method raises SsconfError if the value is not there, or is not what it should be.
    """

    def __init__(self, folder: Path = paths.SSCONF_DIR) -> None:
        self._folder = folder

    def value(self, key: str) -> str:
        """The value of any key, without its final line end."""
        if not _KEY.fullmatch(key):
            raise SsconfError(shown(key), "is no key")
        file = _file(self._folder, key)
        try:
            with file.open("rb") as stream:
                data = stream.read(_LARGEST + 1)
        except FileNotFoundError:
            hint = "brine config export-ssconf makes it, from a configuration"
            raise SsconfError(key, f"there is no {file}", hint=hint) from None
        except OSError as error:
            raise SsconfError(key, f"{file} can't be read: {error.strerror}") from error
        if len(data) > _LARGEST:
            raise SsconfError(key, f"{file} is larger than {_LARGEST} bytes")
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise SsconfError(key, f"{file} is not UTF-8 at byte {error.start}") from None
        if "\0" in text:
            raise SsconfError(key, f"{file} has a NUL byte at {text.index(chr(0))}")
        return text.removesuffix("\n")

    def lines(self, key: str) -> list[str]:
        """The items of a list."""
        return [line for line in self.value(key).split("\n") if line]

    def cluster_name(self) -> str:
        """The cluster's name."""
        return self._line("cluster_name")

    def cluster_tags(self) -> list[str]:
        """The cluster's tags."""
        return self.lines("cluster_tags")

    def master_node(self) -> str:
        """The master's name."""
        return self._line("master_node")

    def master_ip(self) -> str:
        """The cluster's IP address, which the master has."""
        return self._line("master_ip")

    def master_netdev(self) -> str:
        """The interface that has it."""
        return self._line("master_netdev")

    def master_netmask(self) -> int:
        """Its prefix length."""
        return self._number("master_netmask")

    def master_candidates(self) -> list[str]:
        """Names of the nodes that have the configuration."""
        return self.lines("master_candidates")

    def master_candidates_ips(self) -> list[str]:
        """Their primary IP addresses, in the same order."""
        return self.lines("master_candidates_ips")

    def node_list(self) -> list[str]:
        """Names of all nodes."""
        return self.lines("node_list")

    def offline_nodes(self) -> list[str]:
        """Names of the nodes that are offline."""
        return self.lines("offline_nodes")

    def online_nodes(self) -> list[str]:
        """Names of the others."""
        return self.lines("online_nodes")

    def node_primary_ips(self) -> dict[str, str]:
        """Primary IP addresses by node."""
        return self._mapping("node_primary_ips", " ")

    def node_secondary_ips(self) -> dict[str, str]:
        """Secondary IP addresses by node."""
        return self._mapping("node_secondary_ips", " ")

    def node_vm_capable(self) -> dict[str, bool]:
        """Whether each node may run instances."""
        key = "node_vm_capable"
        return {name: self._truth(key, text) for name, text in self._mapping(key, "=").items()}

    def ssh_ports(self) -> dict[str, int]:
        """Ports of the nodes' SSH daemons."""
        key = "ssh_ports"
        return {name: self._whole(key, text) for name, text in self._mapping(key, "=").items()}

    def instance_list(self) -> list[str]:
        """Names of all instances."""
        return self.lines("instance_list")

    def nodegroups(self) -> dict[str, str]:
        """Names of the node groups by UUID."""
        return self._mapping("nodegroups", " ")

    def networks(self) -> dict[str, str]:
        """Names of the networks by UUID."""
        return self._mapping("networks", " ")

    def hypervisor_list(self) -> list[str]:
        """The enabled hypervisors; the first is the default."""
        return self.lines("hypervisor_list")

    def hvparams(self, hypervisor: str) -> dict[str, Any]:
        """The cluster's parameters of a hypervisor, with the types that they have; those that are
        not known are strings."""
        key = f"{HVPARAMS}{hypervisor}"
        component = params.HYPERVISORS.get(hypervisor, {})
        values: dict[str, Any] = {}
        for name, text in self._mapping(key, "=").items():
            kind = component[name].kind if name in component else params.Kind.STRING
            if kind is params.Kind.BOOL:
                values[name] = self._truth(key, text)
            elif kind is params.Kind.INT:
                values[name] = self._whole(key, text)
            elif kind is params.Kind.MAYBE_STRING and text == "None":
                values[name] = None
            else:
                values[name] = text
        return values

    def uid_pool(self) -> list[tuple[int, int]]:
        """Ranges of user ids, both ends inclusive."""
        try:
            return [(first, last) for first, last in parse_uid_pool(self.value("uid_pool"))]
        except UidPoolError as error:
            raise SsconfError("uid_pool", str(error)) from error

    def primary_ip_family(self) -> int:
        """2 for IPv4, 10 for IPv6, as in :mod:`socket` on Linux."""
        return self._number("primary_ip_family")

    def enabled_user_shutdown(self) -> bool:
        """Whether an instance that its user shut down stays off."""
        return self._truth("enabled_user_shutdown", self.value("enabled_user_shutdown"))

    def maintain_node_health(self) -> bool:
        """Whether nodes look after themselves."""
        return self._truth("maintain_node_health", self.value("maintain_node_health"))

    def release_version(self) -> str:
        """The version of the software that wrote these files."""
        return self._line("release_version")

    def file_storage_dir(self) -> str:
        """Where disks in files are; may be empty."""
        return self._line("file_storage_dir")

    def _line(self, key: str) -> str:
        return one_line(key, self.value(key))

    def _number(self, key: str) -> int:
        return self._whole(key, self.value(key))

    def _whole(self, key: str, text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text):
            raise SsconfError(key, f"{shown(text)} is no whole number")
        return int(text)

    def _truth(self, key: str, text: str) -> bool:
        if text not in ("True", "False"):
            raise SsconfError(key, f"{shown(text)} is neither True nor False")
        return text == "True"

    def _mapping(self, key: str, separator: str) -> dict[str, str]:
        mapping = {}
        for line in self.lines(key):
            name, found, value = line.partition(separator)
            if not found or not name:
                raise SsconfError(key, f"{shown(line)} has no {shown(separator)} in it")
            mapping[name] = value
        return mapping


def _file(folder: Path, key: str) -> Path:
    return folder / f"{_PREFIX}{key}"


def _clean_up(folder: Path) -> None:
    """Remove what writers that were killed left; one that is at work is not that old."""
    long_ago = time.time() - _LONGEST_WRITE_S
    for file in folder.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError):  # its writer, or another, was faster
            if file.stat().st_mtime < long_ago:
                file.unlink()


def _content(value: str) -> bytes:
    return f"{value}\n".encode() if value else b""


def _bytes(folder: Path, key: str) -> bytes | None:
    try:
        return _file(folder, key).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SsconfError(key, f"can't be read: {error.strerror}") from error
