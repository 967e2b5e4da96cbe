"""Logical volumes move between two nodes whose kernels map devices: real LVM, udev and QEMU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from brine.cluster.moves import MoveStep
from brine.common.operation import Operation
from lab.waiting import wait_for
from lab.xen_node import LONGEST_S, XenNode, boot_without_xen
from node.emulated_pair import GROUP, boot_emulated_pair, run_inside
from node.instance_on_node import SMALLEST
from node.moves_on_node import NAME, UNIT, UUID, Pair

pytestmark = pytest.mark.long

PLAINTEXT = {"plaintext": True}
"""QEMU within QEMU may take longer than it is given for its part of a handshake."""

_WRITE = "dd of=/dev/vda bs=512 seek=$((i % 2000)) conv=notrunc,fsync 2>/dev/null"
_NEXT = "echo $i >/w && mv /w /written; usleep 200000"
_WRITES = f"while i=$((i + 1)); do printf %512s $i | {_WRITE}; {_NEXT}; done"
_NOTE = "echo $! >/writer.pid"
_COUNT = f"echo 0 >/written; echo '{_WRITES}' >/writer; i=0 sh /writer >/dev/null 2>&1 & {_NOTE}"


@pytest.fixture(scope="module")
def pair(release: str, packages: list[Path]) -> Iterator[Pair[XenNode]]:
    with boot_emulated_pair(boot_without_xen, release, packages) as found:
        yield found


def volumes(node: XenNode) -> list[str]:
    """The names of the logical volumes, and of the images in the folder."""
    found = node.run(["lvs", "--noheadings", "-o", "lv_name", GROUP]).stdout.split()
    return found + node.run(["find", UNIT, "-name", "*.raw"]).stdout.split()


def check_done(pair: Pair[XenNode], record: Operation) -> None:
    told = [(one.name, one.answer) for one in record.steps]
    assert {one.answer["state"] for one in record.steps} == {"done"}, (told, pair.journals())


def runs_alone(pair: Pair[XenNode], name: str, disks: int = 1) -> None:
    """The guest runs on one node, and the other has nothing of it."""
    for node in pair.by_name.values():
        for noun in ("move", "operations"):
            assert node.run(["brine", noun, "list", "--json"]).stdout.strip() == "[]"
    rows = {one: listed(node) for one, node in pair.by_name.items()}
    assert [(one, row["status"]) for one, found in rows.items() for row in found] == [
        (name, "running")
    ]
    for one, node in pair.by_name.items():
        assert len(volumes(node)) == (disks if one == name else 0), volumes(node)


def listed(node: XenNode) -> Any:
    return json.loads(node.run(["brine", "instance", "list", "--json"]).stdout)


def written(node: XenNode) -> int:
    return int(run_inside(node, NAME, "cat /written"))


def test_logical_volumes_move(pair: Pair[XenNode]) -> None:
    n1, n2 = pair["n1"], pair["n2"]
    spec = {
        **SMALLEST,
        "name": NAME,
        "uuid": UUID,
        "node": "n1",
        "claim_serial": 1,
        "accel": "kvm",
        "cpu": "qemu64",
        "disks": [{"name": "data", "size_mib": 32, "unit": GROUP}],
        "admin_state": "up",
    }
    n1.run(["brine", "instance", "define", "-"], stdin=json.dumps(spec))
    n1.run(["brine", "instance", "start", NAME], timeout_s=LONGEST_S)
    run_inside(n1, NAME, _COUNT)
    wait_for("writes", lambda: written(n1) > 3, timeout_s=LONGEST_S)

    # Live: mirrored into a volume that the target's driver makes.
    check_done(pair, pair.move("n1", "n2", 2, wishes=PLAINTEXT))
    before = written(n2)
    wait_for("further writes", lambda: written(n2) > before, timeout_s=LONGEST_S)
    runs_alone(pair, "n2")
    number = written(n2)
    sector = f"dd if=/dev/vda bs=512 skip=$(({number} % 2000)) count=1 2>/dev/null"
    assert int(run_inside(n2, NAME, sector)) >= number

    # And back, cold.
    run_inside(n2, NAME, "kill $(cat /writer.pid) && sleep 5 && sync")
    checksum = run_inside(n2, NAME, "sha256sum </dev/vda")
    record = pair.move("n2", "n1", 3, cold=True)
    check_done(pair, record)
    assert MoveStep.COPY in [one.name for one in record.steps]
    runs_alone(pair, "n1")
    assert run_inside(n1, NAME, "sha256sum </dev/vda") == checksum


def test_a_group_with_less_space_is_named_before_anything_starts(pair: Pair[XenNode]) -> None:
    n2 = pair["n2"]
    n2.run(["lvcreate", "--yes", "--name", "other", "--size", "48M", GROUP])
    for cold in (False, True):
        record = pair.move("n1", "n2", 4, cold=cold, wishes={} if cold else PLAINTEXT)
        last = record.steps[1]
        assert (last.name, last.answer["state"]) == (MoveStep.PREPARE, "failed")
        assert f"{GROUP} of n2 has 20 MiB free, and 32 are needed" in last.answer["error"]
        assert "\n" not in last.answer["error"]
    n2.run(["lvremove", "--yes", f"{GROUP}/other"])
    runs_alone(pair, "n1")


def test_a_file_moves_to_a_group_and_back(pair: Pair[XenNode]) -> None:
    """The target has no folder of that name, so the unit of disks that name none gets the disk."""
    n1, n2 = pair["n1"], pair["n2"]
    n1.run(["brine", "instance", "stop", NAME], timeout_s=LONGEST_S)
    n1.run(["brine", "disk", "move", NAME, "data", "--to", UNIT], timeout_s=LONGEST_S)
    n1.run(["brine", "instance", "start", NAME], timeout_s=LONGEST_S)
    checksum = run_inside(n1, NAME, "sha256sum </dev/vda")
    n2.write("/etc/brine/storage.toml", f'default_unit = "{GROUP}"\n')
    check_done(pair, pair.move("n1", "n2", 5, wishes=PLAINTEXT))
    runs_alone(pair, "n2")
    assert n2.run(["lvs", "--noheadings", "-o", "lv_name", GROUP]).stdout.split()
    assert run_inside(n2, NAME, "sha256sum </dev/vda") == checksum
    check_done(pair, pair.move("n2", "n1", 6, cold=True))
    runs_alone(pair, "n1")
    assert run_inside(n1, NAME, "sha256sum </dev/vda") == checksum
