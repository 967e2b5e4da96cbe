"""Files that a configuration names and that every node needs: ``brine config extra-files``.

An instance that moves takes its parameters along, but not the files that these name. Source:
design-2.1, "Redistribute Config" and "VNC Console Password".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from brine.common.config import params
from brine.common.config.configuration import Configuration
from brine.common.config.shape import ConfigError, member, shown

PARAMETERS = ("spice_password_file", "vnc_password_file", "vnc_x509_path")
"""The hypervisor parameters that name such a file; the last one a folder with certificates."""


@dataclass(frozen=True, slots=True)
class Use:
    """Where the configuration names a file.

    :param pointer: JSON pointer, with the name in place of an instance's UUID.
    :param instance: whose file it is; None for the whole cluster, or all of an operating system.
    :param hypervisor: whose parameter it is.
    """

    pointer: str
    instance: str | None
    hypervisor: str
    parameter: str


def extra_files(configuration: Configuration) -> dict[str, list[Use]]:
    """The paths, sorted, and who uses each.

    What a hypervisor has for the whole cluster counts if the hypervisor is enabled.

    :raises ConfigError: if a path can't be printed in one line.
    """
    found: dict[str, list[Use]] = {}
    for path, use in _uses(configuration):
        if not path.isprintable():
            raise ConfigError(f"{shown(path)} is no path of a file", where=use.pointer)
        found.setdefault(path, []).append(use)
    return dict(sorted(found.items()))


def _uses(configuration: Configuration) -> Iterator[tuple[str, Use]]:
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
) -> Iterator[tuple[str, Use]]:
    """The files that the parameters *values* name."""
    component = params.HYPERVISORS.get(hypervisor, {})
    for parameter in PARAMETERS:
        path = values.get(parameter)
        if parameter in component and isinstance(path, str) and path:
            yield path, Use(f"{where}/{parameter}", instance, hypervisor, parameter)
