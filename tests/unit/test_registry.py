"""The plan of a definition, made of what is known of an instance and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from brine.instance.registry import KnownInstance, plan_definition
from brine.instance.store import InstanceError
from brine.instance.validate import completed
from brine.vm.spec import Spec

DATA: dict[str, Any] = {"name": "web1", "disks": [{"path": "/d"}]}
SPEC = completed(DATA)
OTHER = "1b9f9bd1-8b7a-4b9e-9c51-0d3f6a2f0f1e"
XEN = completed({"name": "web1", "hypervisor": "xen-pvh", "kernel": "/k"})


def known(spec: Spec) -> KnownInstance:
    return KnownInstance(spec, has_file=True)


def test_a_first_definition_has_no_former_keys() -> None:
    plan = plan_definition(DATA, KnownInstance())
    assert plan.spec == SPEC
    assert plan.changes()
    assert plan.is_first()
    assert not plan.replaces_damaged()
    assert plan.new_machine() is None
    assert plan.changed_keys() == []


def test_the_same_definition_changes_nothing() -> None:
    plan = plan_definition(DATA, known(SPEC))
    assert not plan.changes()
    assert not plan.is_first()
    assert plan.changed_keys() == []


def test_in_the_place_of_a_damaged_spec_the_last_start_counts() -> None:
    started = replace(SPEC, admin_state="up")
    plan = plan_definition(DATA, KnownInstance(last=started, has_file=True))
    assert plan.spec == started
    assert plan.replaces_damaged()
    assert not plan.is_first()


@pytest.mark.parametrize(
    ("before", "change", "what"),
    [
        (SPEC, {"memory_mib": 256}, None),
        (XEN, {"hypervisor": "kvm"}, "hypervisor"),
        (XEN, {"hypervisor": "xen-pvh", "kernel": "/k", "uuid": OTHER}, "UUID"),
    ],
)
def test_a_new_hypervisor_or_uuid_makes_another_machine(
    before: Spec, change: dict[str, Any], what: str | None
) -> None:
    plan = plan_definition({"name": "web1", **change}, known(before))
    assert plan.new_machine() == what


def test_what_a_definition_does_to_its_state_is_in_the_plan() -> None:
    plan = plan_definition({**DATA, "admin_state": "up"}, known(SPEC))
    assert plan.raises_it()
    assert plan.changed_keys() == ["admin_state"]
    by_user = replace(SPEC, admin_state_source="user")
    kept = plan_definition({**DATA, "admin_state": "up"}, known(by_user), keeps_user_state=True)
    assert not kept.changes()


def test_an_edit_of_a_spec_that_has_changed_is_refused() -> None:
    with pytest.raises(InstanceError, match="during this edit"):
        plan_definition(DATA, known(replace(SPEC, vcpus=7)), over=SPEC)
    with pytest.raises(InstanceError, match="during this edit"):
        plan_definition(DATA, KnownInstance(), over=SPEC)
