"""Confd's answers, besides those that the interoperability tests compare for all types."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brine.confd.answers import Answers
from brine.confd.protocol import (
    LARGEST_DATAGRAM,
    ConfdReply,
    ErrorCode,
    ReplyStatus,
    RequestType,
    Role,
)
from brine.config.model import Configuration
from brine.config.schema import ConfigError
from lab.ganeti_config import ganeti_config, instance_ip, instance_name, node_ip, node_name, uuid_of

UNKNOWN = ConfdReply(ReplyStatus.ERROR, ErrorCode.UNKNOWN_ENTRY, 1)
ARGUMENT = ConfdReply(ReplyStatus.ERROR, ErrorCode.ARGUMENT, 1)
NOT_IMPLEMENTED = ConfdReply(ReplyStatus.NOT_IMPLEMENTED, ErrorCode.ARGUMENT, 1)


def answers(data: dict[str, Any] | None = None) -> Answers:
    """Those of a cluster of six nodes and twelve instances; the fifth is drained, the last offline.

    Instance N lives on node (N - 1) mod 6 + 1; the tenth is mirrored from node 4 to node 5.
    """
    return Answers(Configuration.from_json(data or ganeti_config(nodes=6, instances=12)))


def ok(answer: Any) -> ConfdReply:
    """A reply from that cluster."""
    return ConfdReply(ReplyStatus.OK, answer, 1)


@pytest.mark.parametrize(
    ("drained", "offline", "role"),
    [(True, True, Role.DRAINED), (False, True, Role.OFFLINE), (False, False, Role.REGULAR)],
)
def test_roles_of_a_node_that_is_several_things(drained: bool, offline: bool, role: Role) -> None:
    data = ganeti_config()
    data["nodes"][uuid_of("node", 3)].update(
        drained=drained, offline=offline, master_candidate=drained or offline
    )
    assert answers(data).answer(RequestType.NODE_ROLE, node_name(3)) == ok(role)


def test_a_short_name_that_two_have_is_no_name() -> None:
    data = ganeti_config()
    data["nodes"][uuid_of("node", 3)]["name"] = "node2.example.org"
    assert answers(data).answer(RequestType.NODE_ROLE, "node2") == UNKNOWN


NAMES = sorted(instance_name(number) for number in range(1, 13))
NODE_OF_IP = RequestType.NODE_IP_OF_INSTANCE_IP


@pytest.mark.parametrize(
    ("kind", "query", "reply"),
    [
        (NODE_OF_IP, {"1": instance_ip(3), "0": None}, ok(node_ip(3))),
        (NODE_OF_IP, {"1": "172.16.0.10"}, UNKNOWN),
        (NODE_OF_IP, {"1": instance_ip(3), "2": [instance_ip(4)]}, ok(node_ip(3))),
        (NODE_OF_IP, {"2": []}, ok([])),
        (NODE_OF_IP, {}, ok([])),
        (NODE_OF_IP, {"1": [instance_ip(3)]}, ARGUMENT),
        (NODE_OF_IP, {"2": [5]}, ARGUMENT),
        (NODE_OF_IP, {"1": instance_ip(3), "0": 5}, ARGUMENT),
        (RequestType.CLUSTER_MASTER, {"3": ["2", "0"]}, ok([node_ip(1), node_name(1)])),
        (RequestType.CLUSTER_MASTER, {}, ok([])),
        (RequestType.CLUSTER_MASTER, {"3": ["name"]}, ARGUMENT),
        (RequestType.CLUSTER_MASTER, {"3": 5}, ARGUMENT),
        (RequestType.CLUSTER_MASTER, {"3": [1e400]}, ARGUMENT),
        (RequestType.CONFIG, "/cluster/cluster_name", ok("cluster.example.com")),
        (RequestType.CONFIG, "/cluster/uid_pool/0/1", ok(4099)),
        (RequestType.CONFIG, "/serial_no", ok(42)),
        (RequestType.CONFIG, "/version", ok(3000000)),
        (RequestType.CONFIG, f"/nodes/{uuid_of('node', 2)}/name", ok(node_name(2))),
        (
            RequestType.CONFIG,
            f"/instances/{uuid_of('instance', 2)}/nics/0/ip",
            ok(instance_ip(2)),
        ),
        (RequestType.CONFIG, "/networks", ok({})),
        (RequestType.CONFIG, "/filters", ok({})),
        *(
            (RequestType.CONFIG, pointer, ARGUMENT)
            for pointer in ("nope", "/nope", "/nodes/nope", "/cluster/tags/0", "/cluster/tags/-")
        ),
        *((RequestType.CONFIG, pointer, ARGUMENT) for pointer in ("/~2", "/serial_no/1")),
        (RequestType.OFFLINE_NODES, None, ok([node_name(6)])),
        (RequestType.INSTANCES, None, ok(NAMES)),
        (RequestType.INSTANCES, NAMES[8], ok(NAMES[9:])),
        (RequestType.INSTANCES, NAMES[-1], ok([])),
        (RequestType.INSTANCES, 5, ARGUMENT),
        (RequestType.INSTANCE_PRIMARY_NODE, instance_name(8), ok(node_name(2))),
        *((kind, None, NOT_IMPLEMENTED) for kind in (12, 99, 103, -1, 10**30)),
        # What must be a string.
        *product((1, 7, 8, 9, 10, 102), (None, 5, True, {}, [], ["node1"]), (ARGUMENT,)),
    ],
)
def test_each_question_has_its_answer(kind: int, query: Any, reply: ConfdReply) -> None:
    assert answers().answer(kind, query) == reply


def test_the_whole_configuration_and_whole_sections() -> None:
    data = ganeti_config(nodes=6, instances=12)
    assert answers(data).answer(RequestType.CONFIG, "") == ok(data)
    assert answers(data).answer(RequestType.CONFIG, "/nodes") == ok(data["nodes"])


def test_sections_that_no_datagram_holds_are_not_even_written_out() -> None:
    many = answers(ganeti_config(nodes=2, instances=1100))
    too_large = ConfdReply(ReplyStatus.ERROR, ErrorCode.TOO_LARGE, 1)
    for kind, query in ((10, ""), (10, "/instances"), (10, "/disks")):
        assert many.answer(kind, query) == too_large
    assert many.answer(RequestType.CONFIG, "/instances/nope") == ARGUMENT
    assert many.answer(RequestType.CONFIG, "/serial_no") == ok(42)


def test_an_ipv6_address_is_found_however_it_is_written() -> None:
    data = ganeti_config()
    data["instances"][uuid_of("instance", 2)]["nics"][0]["ip"] = "2001:DB8:0::5"
    data["instances"][uuid_of("instance", 3)]["nics"][0]["ip"] = "::no::address"
    some = answers(data)
    for ip in ("2001:DB8:0::5", "2001:db8::5", "2001:db8:0:0:0:0:0:5"):
        assert some.answer(RequestType.NODE_IP_OF_INSTANCE_IP, {"1": ip}) == ok(node_ip(2))
    assert some.answer(RequestType.NODE_IP_OF_INSTANCE_IP, {"1": "::no::address"}) == ok(node_ip(3))


def test_pages_of_long_names_fit_a_datagram() -> None:
    data = ganeti_config(instances=600)
    for number, instance in enumerate(data["instances"].values()):
        instance["name"] = f"{number:03}{'x' * 200}.example.com"
    some = answers(data)
    names: list[str] = []
    while page := some.answer(RequestType.INSTANCES, names[-1] if names else "").answer:
        assert len(json.dumps(json.dumps(page))) < LARGEST_DATAGRAM - 1000
        names += page
    assert names == sorted(instance["name"] for instance in data["instances"].values())


def test_dangling_references_are_no_answer_and_no_harm() -> None:
    data = ganeti_config()
    data["instances"][uuid_of("instance", 1)].update(primary_node="gone", disks=["gone"])
    data["cluster"]["master_node"] = "gone"
    data["disks"][uuid_of("disk", 2)].update(dev_type="drbd", logical_id=[[], {}, 1, 2, 3, ""])
    data["disks"][uuid_of("disk", 3)].update(dev_type="drbd", logical_id=["x"])
    data["disks"][uuid_of("disk", 4)].update(dev_type="drbd", logical_id=["x", "y", 1, 2, 3])
    some = answers(json.loads(json.dumps(data)))
    assert some.answer(RequestType.INSTANCE_PRIMARY_NODE, instance_name(1)) == UNKNOWN
    assert some.answer(RequestType.NODE_IP_OF_INSTANCE_IP, {"1": instance_ip(1)}) == UNKNOWN
    assert some.answer(RequestType.CLUSTER_MASTER, None) == UNKNOWN
    assert some.answer(RequestType.INSTANCE_DISKS, instance_name(1)) == ok([])
    assert some.answer(RequestType.NODE_DRBD, node_name(1)) == ok([])


ODD: list[Any] = [
    None,
    5,
    -1,
    1.5,
    True,
    "",
    "x",
    [],
    {},
    [[]],
    [{}],
    [None],
    {"": None},
    {"default": 5},
]


@settings(max_examples=2000, deadline=None)
@given(st.data())
def test_a_configuration_with_odd_values_is_refused_or_answered_from(data: st.DataObject) -> None:
    """Whatever JSON is in the place of a value: a clear error, or answers, and nothing else."""
    wrong = ganeti_config(nodes=2, instances=10)
    holder: Any = wrong
    for _ in range(data.draw(st.integers(0, 6))):
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        inner = holder[data.draw(st.sampled_from(keys))]
        if not isinstance(inner, (dict, list)) or not inner:
            break
        holder = inner
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    holder[data.draw(st.sampled_from(keys))] = data.draw(st.sampled_from(ODD))
    try:
        configuration = Configuration.parse(json.dumps(wrong).encode())
    except ConfigError as error:
        assert str(error).isprintable()
        return
    some = Answers(configuration)
    for kind in RequestType:
        for query in (None, node_name(1), instance_name(10), {"1": instance_ip(1)}, ""):
            json.dumps(some.answer(kind, query).answer)
