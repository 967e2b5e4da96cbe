"""The choice of an instance's hypervisor: by its spec, or by its unit's last start. Only the chosen
one is loaded."""

from __future__ import annotations

from brine.instance.hypervisor import Hypervisor
from brine.vm.files import InstanceFiles
from brine.vm.spec import Spec


def hypervisor_of(spec: Spec) -> Hypervisor:
    """The hypervisor that a spec asks for."""
    return _implementation(is_xen=spec.is_xen())


def hypervisor_running(name: str) -> Hypervisor:
    """The hypervisor of an instance's last start, whatever its spec says now."""
    # QEMU for a user who may not look: only root gets at a domain.
    return _implementation(is_xen=InstanceFiles(name).has_domain())


def _implementation(*, is_xen: bool) -> Hypervisor:
    if is_xen:
        from brine.instance.xen.domain import Xen  # one of the two is needed

        return Xen()
    from brine.instance.kvm.guest import Kvm  # one of the two is needed

    return Kvm()
