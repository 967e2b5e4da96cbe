"""A domain that moves between two Xen nodes: stopped, copied and compared, and started again."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from brine.cluster.moves import MoveStep
from brine.common.operation import Operation
from lab.packages import build_packages
from lab.xen_domain import rows, wait_ready
from lab.xen_node import LONGEST_S, XenNode, boot_xen_node
from node.emulated_pair import GROUP, boot_emulated_pair
from node.moves_on_node import NAME, UNIT, UUID, Pair
from xen.instances_on_xen import PVH_MEMORY_MIB, forget_log, spec_of, states

pytestmark = pytest.mark.long

SIZE_MIB = 16
_FILL = "head -c 8M /dev/urandom | dd of={path} bs=1M conv=notrunc,fsync 2>/dev/null"


@pytest.fixture(scope="module")
def pair(release: str) -> Iterator[Pair[XenNode]]:
    with boot_emulated_pair(boot_xen_node, release, build_packages()) as found:
        for node in found.by_name.values():
            # Other nodes of Xen's have none.
            node.run(["rm", "/usr/bin/qemu-system-x86_64"])
        yield found


def disks(node: XenNode) -> list[str]:
    """The paths of the instance's disks."""
    spec = json.loads(node.run(["brine", "instance", "info", NAME, "--json"]).stdout)["spec"]
    return [str(one["path"]) for one in spec["disks"]]


def checksums(node: XenNode) -> list[str]:
    return [node.run(["sha256sum", path]).stdout.split()[0] for path in disks(node)]


def check_moved(pair: Pair[XenNode], record: Operation, source: str, target: str) -> None:
    """The move has ended well, and nothing is left at its source but a note of the claim."""
    told = [(one.name, one.answer) for one in record.steps]
    assert {one.answer["state"] for one in record.steps} == {"done"}, (told, pair.journals())
    assert {MoveStep.STOP, MoveStep.COPY} <= {one.name for one in record.steps}
    left, here = pair[source], pair[target]
    assert [one.name for one in rows(left)] == []
    assert states(left) == {}
    assert left.run(["find", UNIT, "-name", "*.raw"]).stdout == ""
    assert left.run(["lvs", "--noheadings", GROUP]).stdout == ""
    serial = record.facts["serial"]
    (claim,) = json.loads(left.run(["brine", "node", "claims", "--json"]).stdout)
    assert (claim["name"], claim["node"], claim["serial"]) == (NAME, target, serial)
    assert json.loads(here.run(["brine", "node", "claims", "--json"]).stdout) == []
    for node in (left, here):
        for noun in ("move", "operations"):
            assert json.loads(node.run(["brine", noun, "list", "--json"]).stdout) == []


def test_a_domain_moves_cold(pair: Pair[XenNode]) -> None:
    n1, n2 = pair["n1"], pair["n2"]
    spec = spec_of(
        NAME,
        uuid=UUID,
        node="n1",
        claim_serial=1,
        hypervisor="xen-pvh",
        memory_mib=PVH_MEMORY_MIB,
        disks=[
            {"name": "file", "unit": UNIT, "size_mib": SIZE_MIB},
            {"name": "lv", "unit": GROUP, "size_mib": SIZE_MIB},
        ],
    )
    n1.run(["brine", "instance", "define", "-"], stdin=json.dumps(spec))
    for path in disks(n1):
        n1.shell(_FILL.format(path=path))
    before = checksums(n1)
    assert len(set(before)) == 2
    n1.run(["brine", "instance", "start", NAME], timeout_s=LONGEST_S)
    wait_ready(n1, NAME)

    # While it runs it moves with --cold only, and that is said before anything begins.
    refused = n1.run(["brine", "move", "offer", NAME], check=False)
    assert refused.returncode == 1
    assert "a domain of Xen's moves only while it does not run" in refused.stderr
    assert "--cold" in refused.stderr
    record = pair.move("n1", "n2", 2)
    (offer,) = record.steps
    assert (offer.name, offer.answer["state"]) == (MoveStep.OFFER, "failed")
    assert "\n" not in offer.answer["error"]
    assert states(n1)[NAME]["status"] == "running"
    assert states(n2) == {}

    # Stopped, moved, and started.
    forget_log(n2, NAME)
    check_moved(pair, pair.move("n1", "n2", 2, cold=True), "n1", "n2")
    wait_ready(n2, NAME)
    assert [one.name for one in rows(n2)] == [NAME]
    assert states(n2)[NAME]["status"] == "running"
    assert checksums(n2) == before

    # And back, off as it is.
    n2.run(["brine", "instance", "stop", "--force", NAME], timeout_s=LONGEST_S)
    record = pair.move("n2", "n1", 3)
    told = [(one.name, one.answer) for one in record.steps]
    assert {one.answer["state"] for one in record.steps} == {"done"}, (told, pair.journals())
    assert states(n2) == {}
    assert rows(n1) == []
    assert states(n1)[NAME]["admin_state"] == "down"
    assert checksums(n1) == before
