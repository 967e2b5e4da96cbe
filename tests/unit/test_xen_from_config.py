"""Instances of the cluster's configuration that are domains of Xen's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from brine.common.errors import BrineError
from brine.config.model import Configuration
from brine.config.verify import find
from brine.instance.from_config import spec_of
from brine.instance.spec import Spec
from brine.instance.validate import define
from lab.ganeti_config import ganeti_config

pytestmark = pytest.mark.usefixtures("own_node")


def imported(hypervisor: str = "xen-pvm", **hvparams: Any) -> tuple[dict[str, Any], list[str]]:
    data = ganeti_config(nodes=1, instances=1)
    (instance,) = data["instances"].values()
    instance["hypervisor"] = hypervisor
    instance["hvparams"] = hvparams
    configuration = Configuration.from_json(data)
    (found,) = configuration.instances.values()
    return spec_of(configuration, found)


def spec(**hvparams: Any) -> Spec:
    return define(imported(**hvparams)[0])


def test_a_kernel_of_the_node(own_node: Path) -> None:
    found = spec(kernel_path="/boot/k", initrd_path="/boot/i", kernel_args="ro quiet", cpu_cap=50)
    assert (found.hypervisor, found.kernel, found.initrd) == ("xen-pvm", "/boot/k", "/boot/i")
    assert found.append == "root=/dev/xvda1 ro quiet"
    assert (found.cpu_limit_percent, found.cpu_weight) == (50, 0)
    assert found.disks
    assert found.nics
    assert found.user_shutdown == "stop"


def test_a_users_shutdown_is_followed_by_what_the_configuration_says(own_node: Path) -> None:
    kernel = {"kernel_path": "/boot/k", "initrd_path": "/boot/i"}
    assert spec(**kernel, user_shutdown=True).user_shutdown == "stop"
    assert spec(**kernel, user_shutdown=False).user_shutdown == "restart"
    assert imported(**kernel, user_shutdown=False)[1] == []
    data = ganeti_config(nodes=1, instances=1)
    (instance,) = data["instances"].values()
    instance["hypervisor"] = "xen-pvm"
    instance["hvparams"] = kernel
    data["cluster"]["hvparams"]["xen-pvm"] = {"user_shutdown": False}
    configuration = Configuration.from_json(data)
    assert not [one for one in find(configuration) if "user_shutdown" in one.where]
    (found,) = configuration.instances.values()
    assert spec_of(configuration, found)[0]["user_shutdown"] == "restart"


def test_a_kernel_on_the_disk() -> None:
    found = spec(use_bootloader=True, bootloader_path="/usr/bin/pygrub", cpu_weight=512)
    assert (found.kernel, found.append, found.cpu_weight) == ("", "", 512)
    with pytest.raises(BrineError, match="only pygrub has a counterpart"):
        spec(use_bootloader=True, bootloader_path="/usr/bin/pvgrub")


def test_what_means_nothing_here_is_told() -> None:
    _, ignored = imported(kernel_path="/boot/k", vif_script="/etc/vif", xen_cmd="xm")
    assert ignored == ["vif_script"]


def test_one_that_needs_a_machine_is_not_run_here() -> None:
    with pytest.raises(BrineError, match="its hypervisor is xen-hvm, and only kvm and xen-pvm"):
        imported("xen-hvm")
