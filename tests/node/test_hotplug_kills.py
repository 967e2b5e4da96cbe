"""Hotplug killed at every step, and many rounds of it, with QEMU 10.0.

The component tests tell the same of QEMU 7.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from component.hotplug_fixtures import booted_pc, booted_q35, images
from component.test_hotplug_guest_kills import (
    rig,
    test_killed_at_any_step_the_same_command_again_ends_right,
)
from component.test_hotplug_guest_refusals import test_many_rounds_leave_nothing
from lab.machine import Machine
from node.hotplug_on_node import node_with_hotplug

__all__ = [
    "booted_pc",
    "booted_q35",
    "images",
    "rig",
    "test_killed_at_any_step_the_same_command_again_ends_right",
    "test_many_rounds_leave_nothing",
]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def machine(packages: list[Path], images: Path) -> Iterator[Machine]:
    """Where VMs run: a node that has QEMU 10.0."""
    with node_with_hotplug("trixie", packages, images) as node:
        yield node
