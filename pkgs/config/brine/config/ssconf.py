"""Ssconf: what every node knows of the cluster, one value per file, written by the master.

Names and formats are Ganeti's: lists have one item a line, ``True`` and ``False`` are truth values.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brine.common import __version__, paths
from brine.common.errors import BrineError
from brine.common.files import sync_folder, write_whole
from brine.common.schema import SchemaError, member, shown
from brine.common.uids import UidPoolError, format_uid_pool, parse_uid_pool, uid_pool_fault
from brine.config import params
from brine.config.model import Configuration
from brine.config.schema import ConfigError

_PREFIX = "ssconf_"
_HVPARAMS = "hvparams_"
"""The prefix of the keys of hypervisors' parameters."""
_DISKPARAMS = "diskparams_"
"""The prefix of the keys of disks' parameters, a line a node."""
_TEMPORARY = ".ssconf-new-"
_LONGEST_WRITE_S = 3600
_NUMBERS = re.compile(r"([0-9]+)")


class SsconfError(BrineError):
    """A value of ssconf that can't be used."""

    def __init__(self, key: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"ssconf {key}: {message}", hint=hint)


def all_values(configuration: Configuration) -> dict[str, str]:
    """All values of a configuration by key, without final line ends.

    :raises SsconfError: if a name would make two lines or words, or a range of user ids is none.
    """
    cluster = configuration.cluster
    if fault := uid_pool_fault(cluster.uid_pool):
        raise SsconfError("uid_pool", fault)
    nodes = list(configuration.nodes.values())
    for node in nodes:
        if " " in node.name or "=" in node.name:
            raise SsconfError("node_list", f"the name {shown(node.name)} has a blank or = in it")
    candidates = [node for node in nodes if node.master_candidate]
    master = configuration.names("nodes").exact(cluster.master_node)
    instances = configuration.instances.values()
    lists: dict[str, Iterable[str]] = {
        "cluster_name": [cluster.name],
        "cluster_tags": sorted(cluster.tags),
        "enabled_user_shutdown": [str(cluster.enabled_user_shutdown)],
        "file_storage_dir": [cluster.file_storage_dir],
        "gluster_storage_dir": [cluster.gluster_storage_dir],
        "hypervisor_list": cluster.enabled_hypervisors,
        "instance_list": sorted((each.name for each in instances), key=_natural),
        "maintain_node_health": [str(cluster.maintain_node_health)],
        "master_candidates": [node.name for node in candidates],
        "master_candidates_certs": _pairs(cluster.candidate_certs),
        "master_candidates_ips": [node.primary_ip for node in candidates],
        "master_ip": [cluster.master_ip],
        "master_netdev": [cluster.master_netdev],
        "master_netmask": [str(cluster.master_netmask)],
        "master_node": [configuration.nodes[master].name if master else ""],
        "networks": _named(configuration.networks.values()),
        "nicparams": _pairs(cluster.nicparams.get("default", {})),
        "node_list": [node.name for node in nodes],
        "node_primary_ips": [f"{node.name} {node.primary_ip}" for node in nodes],
        "node_secondary_ips": [f"{node.name} {node.secondary_ip}" for node in nodes],
        "node_vm_capable": [f"{node.name}={node.vm_capable}" for node in nodes],
        "nodegroups": _named(configuration.nodegroups.values()),
        "offline_nodes": [node.name for node in nodes if node.offline],
        "online_nodes": [node.name for node in nodes if not node.offline],
        "primary_ip_family": [str(cluster.primary_ip_family)],
        "release_version": [__version__],
        "shared_file_storage_dir": [cluster.shared_file_storage_dir],
        "ssh_ports": [f"{node.name}={configuration.nd_params(node)['ssh_port']}" for node in nodes],
        "uid_pool": format_uid_pool(cluster.uid_pool, "\n").split("\n"),
    }
    for hypervisor, component in params.HYPERVISORS.items():
        filled = params.defaults(component) | cluster.hvparams.get(hypervisor, {})
        lists[f"{_HVPARAMS}{hypervisor}"] = _pairs(filled)
    for kind, names in params.DISK_PARAMETERS.items():
        lists[f"{_DISKPARAMS}{kind}"] = [
            " ".join((node.name, *_pairs(_chosen(configuration.disk_params(kind, node), names))))
            for node in nodes
        ]
    return {key: "\n".join(_one_line(key, item) for item in items) for key, items in lists.items()}


def file_name(key: str) -> str:
    """The name of the file of a value."""
    return f"{_PREFIX}{key}"


def _one_line(key: str, text: str) -> str:
    if "\n" in text or "\0" in text:
        raise SsconfError(key, f"{shown(text)} is more than one line")
    return text


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def _chosen(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _named(items: Iterable[Any]) -> list[str]:
    return sorted((f"{item.uuid} {item.name}" for item in items), key=_natural)


def _natural(text: str) -> list[Any]:
    """Sorts web10 after web9."""
    parts: list[Any] = _NUMBERS.split(text)
    parts[1::2] = [int(digits) for digits in parts[1::2]]
    return parts


def write(folder: Path, values: Mapping[str, str]) -> list[str]:
    """Put *values* into the files of *folder*, each whole; a file that is right is left alone, and
    files of keys that we know and that have no value are removed. The folder is made, but not
    those above it.

    :return: the keys that changed, sorted.
    """
    changed = changed_keys(folder, values)
    if not changed:
        return changed
    key = changed[0]
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
        for key in changed:
            file = folder / file_name(key)
            if key in values:
                data = _content(values[key])
                write_whole(file, data, mode=0o644, prefix=_TEMPORARY, folder_later=True)
            else:
                file.unlink(missing_ok=True)
        # What writers that were killed left; one that is at work is not that old.
        long_ago = time.time() - _LONGEST_WRITE_S
        for file in folder.glob(f"{_TEMPORARY}*"):
            with contextlib.suppress(FileNotFoundError):  # its writer, or another, was faster
                if file.stat().st_mtime < long_ago:
                    file.unlink()
        sync_folder(folder)
    except OSError as error:
        raise SsconfError(key, f"can't be written in {folder}: {error.strerror}") from error
    return changed


def changed_keys(folder: Path, values: Mapping[str, str]) -> list[str]:
    """The keys that :func:`write` would change, sorted; raises ConfigError if it has no place."""
    if not os.path.isdir(folder.parent):
        hint = f"see whether the name is right; mkdir --parents {folder.parent} makes it"
        raise ConfigError(f"{folder}: there is no folder {folder.parent}", hint=hint)
    changed = []
    for key, value in values.items():
        try:
            if (folder / file_name(key)).read_bytes() != _content(value):
                changed.append(key)
        except FileNotFoundError:
            changed.append(key)
        except OSError as error:
            raise SsconfError(key, f"can't be read: {error.strerror}") from error
    there = (file.name.removeprefix(_PREFIX) for file in folder.glob(f"{_PREFIX}{_HVPARAMS}*"))
    return sorted([*changed, *(key for key in there if key not in values)])


def _content(value: str) -> bytes:
    return f"{value}\n".encode() if value else b""


class Ssconf:
    """Reads the values of a folder; raises SsconfError if one is not there, or can't be."""

    def __init__(self, folder: Path = paths.SSCONF_DIR) -> None:
        self._folder = folder

    def value(self, key: str) -> str:
        """The value of a key, without its final line end."""
        file = self._folder / file_name(key)
        try:
            return file.read_bytes().decode().removesuffix("\n")
        except FileNotFoundError:
            hint = "brine config export-ssconf makes it, from a configuration"
            raise SsconfError(key, f"there is no {file}", hint=hint) from None
        except OSError as error:
            raise SsconfError(key, f"{file} can't be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SsconfError(key, f"{file} is not UTF-8 at byte {error.start}") from None

    def cluster_name(self) -> str:
        """The cluster's name."""
        return _one_line("cluster_name", self.value("cluster_name"))

    def master_node(self) -> str:
        """The master's name."""
        return _one_line("master_node", self.value("master_node"))

    def uid_pool(self) -> list[list[int]]:
        """Ranges of user ids, both ends inclusive."""
        try:
            return parse_uid_pool(self.value("uid_pool"))
        except UidPoolError as error:
            raise SsconfError("uid_pool", str(error)) from error

    def disk_params(self, kind: str, is_node: Callable[[str], bool]) -> dict[str, Any]:
        """The parameters of the new disks of a kind on a node: those that a node goes by.

        :param is_node: whether a name is the node's. Without one, they are the built-in ones.
        """
        key, component = f"{_DISKPARAMS}{kind}", params.DISKS[kind]
        found = _chosen(params.defaults(component), params.DISK_PARAMETERS[kind])
        for line in self.value(key).splitlines():
            name, *pairs = line.split(" ")
            if not is_node(name):
                continue
            for pair in pairs:
                parameter, _, text = pair.partition("=")
                if parameter in found:
                    is_number = int in component[parameter].kinds
                    value = int(text) if is_number and text.isdecimal() else text
                    try:
                        found[parameter] = component[parameter].check(value, parameter)
                    except SchemaError as error:
                        raise SsconfError(key, f"{name}: {error}") from error
            break
        return found


# Files that a configuration names and that every node needs: ``brine config extra-files``.

_PARAMETERS = ("spice_password_file", "vnc_password_file", "vnc_x509_path")
"""The hypervisor parameters that name such a file; the last one a folder with certificates."""


@dataclass(frozen=True, slots=True)
class FileUse:
    """Where the configuration names a file, with the keys that ``--json`` prints."""

    pointer: str
    instance: str | None  # None for the whole cluster, or all of an operating system
    hypervisor: str
    parameter: str


def extra_files(configuration: Configuration) -> dict[str, list[FileUse]]:
    """The paths, sorted, and the users of each.

    What a hypervisor has for the whole cluster counts if the hypervisor is enabled.

    :raises ConfigError: if a path can't be printed in one line.
    """
    found: dict[str, list[FileUse]] = {}
    for where, instance, hypervisor, values in _levels(configuration):
        for name in _PARAMETERS:
            path = values.get(name)
            is_known = name in params.HYPERVISORS.get(hypervisor, {})
            if is_known and isinstance(path, str) and path:
                use = FileUse(f"{where}/{name}", instance, hypervisor, name)
                if not path.isprintable():
                    raise ConfigError(f"{shown(path)} is no path of a file", where=use.pointer)
                found.setdefault(path, []).append(use)
    return dict(sorted(found.items()))


def _levels(
    configuration: Configuration,
) -> Iterator[tuple[str, str | None, str, Mapping[str, Any]]]:
    """Where hypervisors have parameters: pointer, instance, hypervisor, parameters."""
    cluster = configuration.cluster
    for hypervisor in cluster.enabled_hypervisors:
        where = member("/cluster/hvparams", hypervisor)
        yield where, None, hypervisor, cluster.hvparams.get(hypervisor, {})
        for system, groups in cluster.os_hvp.items():
            where = member(member("/cluster/os_hvp", system), hypervisor)
            yield where, None, hypervisor, groups.get(hypervisor, {})
    for one in configuration.instances.values():
        where = member("/instances", one.name) + "/hvparams"
        yield where, one.name, one.hypervisor, one.hvparams
