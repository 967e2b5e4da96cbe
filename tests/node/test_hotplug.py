"""Hotplug as packaged, on real nodes of both releases: with QEMU 7.2 and with QEMU 10.0.

The stories are those of the component tests; here they are told of installed packages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from component.hotplug_fixtures import booted_pc, booted_q35, images, pc, vm
from component.test_hotplug_guest_disks import (
    image,
    pc_with_aio,
    test_a_disk_that_is_read_only_can_not_be_written,
    test_a_guest_reads_and_writes_a_disk,
    test_a_mounted_disk_is_taken_all_the_same,
    test_a_qcow2_image_keeps_what_the_guest_wrote,
    test_cache_and_aio_are_as_asked_for,
    used_to_aio,
)
from component.test_hotplug_guest_nics import (
    test_a_guest_gets_a_nic_and_packets_over_a_bridge,
    test_a_guest_gets_packets_over_routes,
    test_a_nic_has_several_queues,
    test_a_nic_moves_to_another_link_in_its_slot,
    test_when_no_slot_is_left_the_limit_is_named,
)
from component.test_hotplug_guest_refusals import (
    deaf,
    test_what_the_guest_keeps_is_not_changed,
    test_what_the_guest_keeps_stays_and_a_later_try_works,
)
from component.test_hotplug_guest_users import test_what_qemu_may_not_open_is_handed_to_it
from lab.machine import Machine
from node.hotplug_on_node import node_with_hotplug

__all__ = [
    "booted_pc",
    "booted_q35",
    "deaf",
    "image",
    "images",
    "pc",
    "pc_with_aio",
    "test_a_disk_that_is_read_only_can_not_be_written",
    "test_a_guest_gets_a_nic_and_packets_over_a_bridge",
    "test_a_guest_gets_packets_over_routes",
    "test_a_guest_reads_and_writes_a_disk",
    "test_a_mounted_disk_is_taken_all_the_same",
    "test_a_nic_has_several_queues",
    "test_a_nic_moves_to_another_link_in_its_slot",
    "test_a_qcow2_image_keeps_what_the_guest_wrote",
    "test_cache_and_aio_are_as_asked_for",
    "test_what_qemu_may_not_open_is_handed_to_it",
    "test_what_the_guest_keeps_is_not_changed",
    "test_what_the_guest_keeps_stays_and_a_later_try_works",
    "test_when_no_slot_is_left_the_limit_is_named",
    "used_to_aio",
    "vm",
]


@pytest.fixture(scope="module")
def machine(release: str, packages: list[Path], images: Path) -> Iterator[Machine]:
    """Where VMs run: a node of each release."""
    with node_with_hotplug(release, packages, images) as node:
        yield node


def test_the_node_has_the_qemu_that_it_is_for(machine: Machine, release: str) -> None:
    said = machine.run(["qemu-system-x86_64", "--version"]).stdout
    assert f"version {'7.2' if release == 'bookworm' else '10.0'}." in said
