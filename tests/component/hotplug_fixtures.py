"""Fixtures of hotplug's tests with real guests, here and on nodes.

Each module that uses them has a fixture `machine`, where all of it happens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from component.hotplug_vm import MACHINES, SCSI, Vm, nothing_left, start_vm
from lab.machine import Machine


@pytest.fixture(scope="module")
def images() -> Iterator[Path]:
    """A folder of this host that the machine has, too, under the same name.

    It is for disks: a node's own files are in memory, where not every kernel has O_DIRECT.
    """
    with tempfile.TemporaryDirectory(prefix="disks-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def booted_pc(machine: Machine) -> Iterator[Vm]:
    """A guest of the machine type pc, with a SCSI controller."""
    with start_vm(machine, "pc", [*MACHINES["pc"], *SCSI]) as vm:
        vm.guest.wait_ready()
        yield vm


@pytest.fixture(scope="module")
def booted_q35(machine: Machine) -> Iterator[Vm]:
    """The same, of the machine type q35, with three ports."""
    with start_vm(machine, "q35", [*MACHINES["q35"], *SCSI]) as vm:
        vm.guest.wait_ready()
        yield vm


@pytest.fixture(params=["booted_pc", "booted_q35"])
def vm(request: pytest.FixtureRequest, machine: Machine) -> Iterator[Vm]:
    """A guest of each machine type; what a test plugs in is out again at its end."""
    assert machine  # pytest has to know beforehand that each guest is on each machine
    with nothing_left(request.getfixturevalue(request.param)) as vm:
        yield vm


@pytest.fixture
def pc(booted_pc: Vm) -> Iterator[Vm]:
    """A guest, for what need not be tried on each machine type."""
    with nothing_left(booted_pc) as vm:
        yield vm
