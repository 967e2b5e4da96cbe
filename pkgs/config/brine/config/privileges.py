"""The keys of a spec that say what root of a node runs for an instance, and how that is confined.

The configuration has them for the instances of a cluster. A node that is in bad hands could offer
an instance with others to another node, whose root would obey: so the master compares.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brine.common.errors import DATA_FAULTS
from brine.config.model import Configuration, Instance
from brine.vm.runtime_file import Runtime
from brine.vm.spec import NOT_CONFINED, SecurityModel, Spec, parse

_OF_BOTH = ("hypervisor", "extra_arguments")
_OF_QEMU = ("qemu", "security_model", "security_user", "chroot")

_DEFAULT_PROGRAM = "/usr/bin/kvm"


def privileges_of(hv: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of an instance of QEMU's, as people write them.

    :param hv: its hypervisor parameters.
    """
    model, program = hv["security_model"], hv["kvm_path"]
    return {
        "extra_arguments": shlex.split(hv["kvm_extra"]),
        "security_model": model,
        "security_user": hv["security_domain"] if model == SecurityModel.USER else "",
        "chroot": hv["use_chroot"],
        **({} if program == _DEFAULT_PROGRAM else {"qemu": program}),
    }


def fault_of_offer(configuration: Configuration, name: str, offer: Any) -> str:
    """Why an instance must not come to another node as its own node offers it: there it has other
    privileges than in the configuration, or runs with others. Empty if it may.

    :param offer: the answer of ``brine move offer``.
    """
    try:
        instance = configuration.instance(name)
        wanted = _wanted(configuration, instance)
        running = declared = _spec_of(offer["spec"])
        if offer["live"]:
            runtime = Runtime.of(json.loads(offer["runtime"]), Path("its runtime file"))
            running = _spec_of(runtime.started_with())
    except DATA_FAULTS as error:
        return f"{name}: can't be compared with the configuration: {error!s:.200}"
    if names := _differences(wanted, declared):
        text = "not as in the configuration on its node; brine instance define --from-config there"
        return f"{name}: {', '.join(names)}: {text}"
    if names := _differences(wanted, running):
        text = "runs with others than the configuration has; restart it, or move it with --cold"
        return f"{name}: {', '.join(names)}: {text}"
    return ""


def _wanted(configuration: Configuration, instance: Instance) -> Spec:
    hv = configuration.hv_params(instance)
    is_qemu = instance.hypervisor == "kvm"
    keys = privileges_of(hv) if is_qemu else {"hypervisor": instance.hypervisor, **NOT_CONFINED}
    return parse(Spec, {"name": instance.name, **keys})


def _spec_of(data: Any) -> Spec:
    """The keys of a spec, as the other node would read them."""
    known = {name: data[name] for name in (*_OF_BOTH, *_OF_QEMU) if name in data}
    return parse(Spec, {"name": "offered", **known})


def _differences(wanted: Spec, found: Spec) -> list[str]:
    names = _OF_BOTH if wanted.is_xen() else (*_OF_BOTH, *_OF_QEMU)
    return [name for name in names if getattr(wanted, name) != getattr(found, name)]
