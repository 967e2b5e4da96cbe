"""Ssconf: what every node knows of the cluster, one value per file, written by the master.

Names and formats are Ganeti's: lists have one item a line, ``True`` and ``False`` are truth values.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brine.common import __version__, paths
from brine.common.errors import BrineError
from brine.common.files import sync_folder, write_whole
from brine.common.schema import member, shown
from brine.common.uids import UidPoolError, format_uid_pool, parse_uid_pool, uid_pool_fault
from brine.config import params
from brine.config.model import Configuration
from brine.config.schema import ConfigError

# Files that a configuration names and that every node needs: ``brine config extra-files``.

PARAMETERS = ("spice_password_file", "vnc_password_file", "vnc_x509_path")
"""The hypervisor parameters that name such a file; the last one a folder with certificates."""


@dataclass(frozen=True, slots=True)
class FileUse:
    """Where the configuration names a file.

    :param pointer: JSON pointer, with the name in place of an instance's UUID.
    :param instance: whose file it is; None for the whole cluster, or all of an operating system.
    :param hypervisor: whose parameter it is.
    """

    pointer: str
    instance: str | None
    hypervisor: str
    parameter: str


def extra_files(configuration: Configuration) -> dict[str, list[FileUse]]:
    """The paths, sorted, and who uses each.

    What a hypervisor has for the whole cluster counts if the hypervisor is enabled.

    :raises ConfigError: if a path can't be printed in one line.
    """
    found: dict[str, list[FileUse]] = {}
    for path, use in _uses(configuration):
        if not path.isprintable():
            raise ConfigError(f"{shown(path)} is no path of a file", where=use.pointer)
        found.setdefault(path, []).append(use)
    return dict(sorted(found.items()))


def _uses(configuration: Configuration) -> Iterator[tuple[str, FileUse]]:
    cluster = configuration.cluster
    for hypervisor in cluster.enabled_hypervisors:
        where = member("/cluster/hvparams", hypervisor)
        yield from _named(cluster.hvparams.get(hypervisor, {}), where, hypervisor)
        for system, groups in cluster.os_hvp.items():
            where = member(member("/cluster/os_hvp", system), hypervisor)
            yield from _named(groups.get(hypervisor, {}), where, hypervisor)
    for instance in configuration.instances.values():
        where = member("/instances", instance.name) + "/hvparams"
        yield from _named(instance.hvparams, where, instance.hypervisor, instance.name)


def _named(
    values: Mapping[str, Any], where: str, hypervisor: str, instance: str | None = None
) -> Iterator[tuple[str, FileUse]]:
    """The files that the parameters *values* name."""
    component = params.HYPERVISORS.get(hypervisor, {})
    for parameter in PARAMETERS:
        path = values.get(parameter)
        if parameter in component and isinstance(path, str) and path:
            yield path, FileUse(f"{where}/{parameter}", instance, hypervisor, parameter)


# The values of ssconf, out of a configuration.

HVPARAMS = "hvparams_"
"""What the keys of hypervisors' parameters begin with."""

_NUMBERS = re.compile(r"([0-9]+)")


class SsconfError(BrineError):
    """A value of ssconf that can't be used.

    :param key: which.
    """

    def __init__(self, key: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"ssconf {key}: {message}", hint=hint)
        self.key = key


def export(configuration: Configuration) -> dict[str, str]:
    """All values of a configuration by key, without final line ends.

    :raises SsconfError: if a name has a line end or a blank, which would make two of it, or a
        range of user ids is none.
    """
    cluster = configuration.cluster
    if fault := uid_pool_fault(cluster.uid_pool):
        raise SsconfError("uid_pool", fault)
    nodes = list(configuration.nodes.values())
    master = configuration.names("nodes").exact(cluster.master_node)
    values: dict[str, str] = {
        "cluster_name": cluster.name,
        "cluster_tags": _lines("cluster_tags", sorted(cluster.tags)),
        "enabled_user_shutdown": str(cluster.enabled_user_shutdown),
        "file_storage_dir": cluster.file_storage_dir,
        "gluster_storage_dir": cluster.gluster_storage_dir,
        "hypervisor_list": _lines("hypervisor_list", cluster.enabled_hypervisors),
        "instance_list": _lines(
            "instance_list",
            sorted((each.name for each in configuration.instances.values()), key=_natural),
        ),
        "maintain_node_health": str(cluster.maintain_node_health),
        "master_candidates": _names("master_candidates", (n for n in nodes if n.master_candidate)),
        "master_candidates_certs": _lines(
            "master_candidates_certs",
            (f"{key}={value}" for key, value in cluster.candidate_certs.items()),
        ),
        "master_candidates_ips": _lines(
            "master_candidates_ips", (n.primary_ip for n in nodes if n.master_candidate)
        ),
        "master_ip": cluster.master_ip,
        "master_netdev": cluster.master_netdev,
        "master_netmask": str(cluster.master_netmask),
        "master_node": configuration.nodes[master].name if master else "",
        "networks": _pairs("networks", configuration.networks.values()),
        "nicparams": _lines(
            "nicparams",
            (f"{name}={value}" for name, value in cluster.nicparams.get("default", {}).items()),
        ),
        "node_list": _names("node_list", nodes),
        "node_primary_ips": _by_node("node_primary_ips", " ", nodes, "primary_ip"),
        "node_secondary_ips": _by_node("node_secondary_ips", " ", nodes, "secondary_ip"),
        "node_vm_capable": _by_node("node_vm_capable", "=", nodes, "vm_capable"),
        "nodegroups": _pairs("nodegroups", configuration.nodegroups.values()),
        "offline_nodes": _names("offline_nodes", (n for n in nodes if n.offline)),
        "online_nodes": _names("online_nodes", (n for n in nodes if not n.offline)),
        "primary_ip_family": str(cluster.primary_ip_family),
        "release_version": __version__,
        "shared_file_storage_dir": cluster.shared_file_storage_dir,
        "ssh_ports": _lines(
            "ssh_ports", (f"{n.name}={configuration.nd_params(n)['ssh_port']}" for n in nodes)
        ),
        "uid_pool": format_uid_pool(cluster.uid_pool, "\n"),
    }
    for hypervisor, component in params.HYPERVISORS.items():
        key = f"{HVPARAMS}{hypervisor}"
        filled = params.defaults(component) | cluster.hvparams.get(hypervisor, {})
        values[key] = _lines(key, (f"{name}={value}" for name, value in filled.items()))
    for key in ("cluster_name", "master_ip", "master_netdev", "file_storage_dir"):
        one_line(key, values[key])
    return values


def one_line(key: str, text: str) -> str:
    """*text*, if it is one line; raises SsconfError."""
    if "\n" in text or "\0" in text:
        raise SsconfError(key, f"{shown(text)} is more than one line")
    return text


def _lines(key: str, items: Iterable[str]) -> str:
    return "\n".join(one_line(key, item) for item in items)


def _names(key: str, items: Iterable[Any]) -> str:
    return _lines(key, (item.name for item in items))


def _pairs(key: str, items: Iterable[Any]) -> str:
    return _lines(key, sorted((f"{item.uuid} {item.name}" for item in items), key=_natural))


def _by_node(key: str, separator: str, nodes: Iterable[Any], attribute: str) -> str:
    pairs = []
    for node in nodes:
        if separator in node.name:
            raise SsconfError(key, f"the name {shown(node.name)} has a {shown(separator)} in it")
        pairs.append(f"{node.name}{separator}{getattr(node, attribute)}")
    return _lines(key, pairs)


def _natural(text: str) -> list[Any]:
    """Sorts web10 after web9."""
    parts: list[Any] = _NUMBERS.split(text)
    parts[1::2] = [int(digits) for digits in parts[1::2]]
    return parts


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

    def cluster_name(self) -> str:
        """The cluster's name."""
        return one_line("cluster_name", self.value("cluster_name"))

    def master_node(self) -> str:
        """The master's name."""
        return one_line("master_node", self.value("master_node"))

    def uid_pool(self) -> list[tuple[int, int]]:
        """Ranges of user ids, both ends inclusive."""
        try:
            return [(first, last) for first, last in parse_uid_pool(self.value("uid_pool"))]
        except UidPoolError as error:
            raise SsconfError("uid_pool", str(error)) from error


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
