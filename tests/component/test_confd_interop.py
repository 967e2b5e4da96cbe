"""brine-confd and Ganeti's own confd and client: the same questions on the same file.

Ganeti's packages are fetched by apt and unpacked; nothing of them is installed.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from brine.confd.client import ConfdClient
from brine.config.apply import apply
from brine.config.store import ConfigStore
from component.confd_process import SECRET, Confd, confd_process
from component.udp_ports import free_port
from lab import confd_wire, ganeti
from lab.confd_answers import RightAnswers, normal
from lab.confd_wire import Asks, Heard
from lab.ganeti_config import (
    DEFAULT_LINK,
    OTHER_LINK,
    Json,
    ganeti_config,
    instance_ip,
    instance_name,
    node_name,
    uuid_of,
)
from lab.waiting import wait_for

pytestmark = pytest.mark.skipif(
    not shutil.which("apt-get"), reason="Ganeti's packages come by apt, which is not there"
)

SIZES = [(3, 4), (20, 200), (100, 2000)]
Question = tuple[int, Any]


@dataclass(frozen=True)
class Both:
    """The two daemons at work on one file."""

    brine: Confd
    ganeti_port: int
    nodes: int
    instances: int
    right: RightAnswers

    def ask_brine(self, type: int, query: Any = None) -> Heard:
        """Ask ours."""
        return ask(self.brine.port, type, query)

    def ask_ganeti(self, type: int, query: Any = None) -> Heard:
        """Ask Ganeti's."""
        return ask(self.ganeti_port, type, query)


_SALTS = (f"salt {number}" for number in itertools.count())


def ask(port: int, type: int, query: Any = None) -> Heard:
    """Ask a daemon; whatever comes must be the answer."""
    heard = ask_for_answers(port, [(type, query)])
    return heard[0]


def ask_for_answers(port: int, questions: list[Question]) -> list[Heard]:
    """Ask all at once; returns the replies, in the order of the questions."""
    salts = [next(_SALTS) for _ in questions]
    replies: dict[str, Heard] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(20)
        client.connect(("127.0.0.1", port))
        for salt, (what, query) in zip(salts, questions, strict=True):
            client.send(confd_wire.request(SECRET, what, query, salt))
        while len(replies) < len(questions):
            heard = confd_wire.opened(SECRET, client.recv(65536))
            assert heard.salt in salts
            replies[heard.salt] = heard
    return [replies[salt] for salt in salts]


def is_silent(port: int, type: int, query: Any) -> bool:
    """Whether a daemon answers what follows a question, and not that."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(20)
        client.connect(("127.0.0.1", port))
        client.send(confd_wire.request(SECRET, type, query, "odd"))
        for number in range(3):
            client.send(confd_wire.request(SECRET, Asks.PING, None, f"ping {number}"))
        heard = [confd_wire.opened(SECRET, client.recv(65536)) for _ in range(3)]
        return all(one.salt.startswith("ping") for one in heard)


@contextmanager
def both_daemons(config: Json) -> Iterator[tuple[Confd, int]]:
    """Ours, and Ganeti's on the port that comes with it; both read the same files."""
    with ExitStack() as stack:
        # With secrets, as Ganeti's answers.
        brine = stack.enter_context(confd_process(config, reveal_secrets=True))
        brine.start()
        port = stack.enter_context(ganeti_beside(brine.folder))
        yield brine, port


@contextmanager
def ganeti_beside(folder: Path) -> Iterator[int]:
    """Ganeti's daemon, which finds its configuration and key in *folder*; yields its port."""
    port = free_port()
    log = folder / "ganeti.log"
    with ganeti.running(ganeti.daemon("confd"), folder, port, log):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(5)
            client.connect(("127.0.0.1", port))

            def answers() -> Heard | None:
                try:
                    client.send(confd_wire.request(SECRET, Asks.NODE_IPS, None, "start"))
                    heard = confd_wire.opened(SECRET, client.recv(65536))
                except (ConnectionRefusedError, TimeoutError):
                    return None
                assert heard.status == 0, heard.answer
                return heard

            wait_for("Ganeti's daemon to answer", answers)
        yield port


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size[0]}nodes-{size[1]}instances")
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    """Both daemons, with the configuration of a small, a middling and a large cluster."""
    nodes, instances = request.param
    config = ganeti_config(nodes=nodes, instances=instances)
    # Different from each other, so that it shows which of them a reply has.
    config["cluster"]["serial_no"] = 7777
    for number, node in enumerate(config["nodes"].values()):
        node["serial_no"] = 100_000 + number
    for number, instance in enumerate(config["instances"].values()):
        instance["serial_no"] = 200_000 + number
    with both_daemons(config) as (brine, port):
        yield Both(brine, port, nodes, instances, RightAnswers(config))


def questions(both: Both) -> list[Question]:
    """Every type, about many objects, in all the ways in which they can be asked about."""
    some_nodes = range(1, both.nodes + 1)
    some_instances = range(1, both.instances + 1, max(1, both.instances // 100))
    found: list[Question] = [(Asks.PING, None), (Asks.NODE_IPS, None)]
    found += [(Asks.MASTER_CANDIDATE_IPS, None), (Asks.CLUSTER_MASTER, None)]
    found += [(Asks.CLUSTER_MASTER, {"3": fields}) for fields in ([0, 1, 2], [2, 0], [1], [])]
    found += [(Asks.INSTANCE_IPS, link) for link in (None, DEFAULT_LINK, OTHER_LINK, "br9")]
    for number in some_nodes:
        name = node_name(number)
        found += [(what, name) for what in (Asks.NODE_ROLE, Asks.NODE_DRBD, Asks.NODE_INSTANCES)]
        found.append((Asks.CONFIG, f"/nodes/{uuid_of('node', number)}/primary_ip"))
    for number in some_instances:
        found.append((Asks.NODE_IP_OF_INSTANCE_IP, {"1": instance_ip(number)}))
        link_and_ip = {"0": DEFAULT_LINK, "1": instance_ip(number)}
        found.append((Asks.NODE_IP_OF_INSTANCE_IP, link_and_ip))
        found.append((Asks.INSTANCE_DISKS, instance_name(number)))
        found.append((Asks.CONFIG, f"/instances/{uuid_of('instance', number)}"))
        found.append((Asks.CONFIG, f"/disks/{uuid_of('disk', number)}/size"))
    # Not whole node groups or networks: Ganeti's daemon adds to them what the file has not.
    for pointer in ("/cluster", "/cluster/uid_pool/0/1", "/serial_no", "/version", "/networks"):
        found.append((Asks.CONFIG, pointer))
    return found


def test_both_daemons_give_the_same_and_right_answers(both: Both) -> None:
    """But for the serial number: Ganeti's daemon gives a node's or an instance's own where it is
    asked about one."""
    for what, query in questions(both):
        ours, theirs = both.ask_brine(what, query), both.ask_ganeti(what, query)
        right = both.right.answer(what, query)
        assert (ours.status, normal(what, ours.answer)) == (0, right), (what, query)
        assert (theirs.status, normal(what, theirs.answer)) == (0, right), (what, query)
        assert ours.serial == both.right.serial(what), (what, query)
        assert theirs.serial == both.right.ganetis_serial(what, query), (what, query)


def test_both_daemons_take_a_list_of_instance_ips(both: Both) -> None:
    query = {"2": [instance_ip(1), "203.0.113.1", instance_ip(2)], "0": DEFAULT_LINK}
    ours = both.ask_brine(Asks.NODE_IP_OF_INSTANCE_IP, query)
    theirs = both.ask_ganeti(Asks.NODE_IP_OF_INSTANCE_IP, query)
    one, other = (
        both.right.answer(Asks.NODE_IP_OF_INSTANCE_IP, {"1": instance_ip(n)}) for n in (1, 2)
    )
    assert ours.answer == theirs.answer == [[0, one, 7777], [1, 0, 0], [0, other, 7777]]
    assert ours.serial == theirs.serial == 7777


def test_both_daemons_know_an_object_by_its_short_name_and_by_its_uuid(both: Both) -> None:
    for what, kind, name in (
        (Asks.NODE_ROLE, "node", node_name(2)),
        (Asks.NODE_DRBD, "node", node_name(2)),
        (Asks.NODE_INSTANCES, "node", node_name(2)),
        (Asks.INSTANCE_DISKS, "instance", instance_name(2)),
    ):
        for query in (name.partition(".")[0], uuid_of(kind, 2)):
            ours, theirs = both.ask_brine(what, query), both.ask_ganeti(what, query)
            assert normal(what, ours.answer) == both.right.answer(what, name), (what, query)
            assert normal(what, theirs.answer) == both.right.answer(what, name), (what, query)


def test_both_daemons_tell_of_the_same_data_collectors(both: Both) -> None:
    """Ganeti's has those that it was built with, too."""
    ours, theirs = both.ask_brine(Asks.DATA_COLLECTORS), both.ask_ganeti(Asks.DATA_COLLECTORS)
    assert ours.answer == both.right.answer(Asks.DATA_COLLECTORS, None)
    assert ours.answer.items() <= theirs.answer.items()


def test_both_daemons_give_the_same_error_codes(both: Both) -> None:
    """Ours says of which configuration, too."""
    for what, query, code in (
        (Asks.NODE_IP_OF_INSTANCE_IP, {"1": "203.0.113.1"}, 0),
        (Asks.NODE_IP_OF_INSTANCE_IP, {"1": instance_ip(1), "0": "br9"}, 0),
        (Asks.NODE_IP_OF_INSTANCE_IP, instance_ip(1), 2),
        (Asks.NODE_IP_OF_INSTANCE_IP, None, 2),
        (Asks.CLUSTER_MASTER, "x", 2),
        (Asks.CLUSTER_MASTER, "", 2),
        (Asks.CONFIG, "/nope", 2),
        (Asks.CONFIG, "cluster", 2),
    ):
        ours, theirs = both.ask_brine(what, query), both.ask_ganeti(what, query)
        assert (ours.status, ours.answer, ours.serial) == (1, code, 7777), (what, query)
        assert (theirs.status, theirs.answer, theirs.serial) == (1, code, 0), (what, query)


def test_where_ganeti_gives_an_error_in_words_we_give_a_code(both: Both) -> None:
    for what, query, code in (
        *((what, "nope", 0) for what in (1, 7, 8, 9)),
        *((what, None, 2) for what in (1, 7, 8, 9, 10)),
        (Asks.INSTANCE_IPS, {"0": OTHER_LINK}, 2),
    ):
        ours, theirs = both.ask_brine(what, query), both.ask_ganeti(what, query)
        assert (ours.status, ours.answer, ours.serial) == (1, code, 7777), (what, query)
        assert (theirs.status, theirs.serial) == (1, 0), (what, query)
        assert isinstance(theirs.answer, str), (what, query)


def test_where_ganeti_is_silent_we_say_what_is_wrong(both: Both) -> None:
    for what, query, answer in (
        (Asks.NODE_ROLE, 5, (1, 2)),
        (Asks.NODE_IP_OF_INSTANCE_IP, {"1": 5}, (1, 2)),
        (Asks.NODE_IP_OF_INSTANCE_IP, {"2": instance_ip(1)}, (1, 2)),
        (Asks.CLUSTER_MASTER, {"3": [7]}, (1, 2)),
        (Asks.CLUSTER_MASTER, 5, (1, 2)),
        (Asks.INSTANCE_IPS, 5, (1, 2)),
        # As Ganeti's own client would send them.
        (Asks.CLUSTER_MASTER, {"3": ["0"]}, (0, [node_name(1)])),
        (12, None, (2, 2)),
        (-1, None, (2, 2)),
    ):
        ours = both.ask_brine(what, query)
        assert (ours.status, ours.answer) == answer, (what, query)
        assert is_silent(both.ganeti_port, what, query), (what, query)


def test_ganetis_client_gets_right_answers_from_our_daemon(both: Both) -> None:
    """All types but 8, which it does not know, though its daemon does."""
    asked = [(what, query) for what, query in questions(both) if what != Asks.NODE_INSTANCES]
    asked.append((Asks.DATA_COLLECTORS, None))
    heard = ganeti.ask_with_client(asked, key=SECRET, peers=["127.0.0.1"], port=both.brine.port)
    for (what, query), reply in zip(asked, heard, strict=True):
        assert reply, (what, query)
        right = both.right.answer(what, query)
        assert (reply.status, normal(what, reply.answer)) == (0, right), (what, query)
        assert reply.serial == both.right.serial(what), (what, query)


def test_ganetis_client_refuses_to_ask_for_a_nodes_instances() -> None:
    with pytest.raises(ganeti.ClientError, match="does not know requests of type 8"):
        ganeti.ask_with_client(
            [(Asks.NODE_INSTANCES, node_name(1))], key=SECRET, peers=["127.0.0.1"], port=1
        )


def test_our_client_gets_right_answers_and_finds_no_disagreement(both: Both) -> None:
    """From Ganeti's daemon, and from the two together where their serial numbers are the same."""
    ganetis, ours = (f"127.0.0.1:{port}" for port in (both.ganeti_port, both.brine.port))
    for what, query in questions(both):
        result = ConfdClient([ganetis], [SECRET]).query(what, query)
        assert result.enough, (what, query)
        answer = normal(what, result.answer())
        assert answer == both.right.answer(what, query), (what, query)
        if both.right.serial(what) == both.right.ganetis_serial(what, query):
            result = ConfdClient([ours, ganetis], [SECRET]).query(what, query)
            assert len(result.replies) == 2, (what, query)
            assert not result.disagreement, (what, query)


def test_both_daemons_agree_on_the_role_of_a_node_with_contradicting_flags() -> None:
    config = ganeti_config(nodes=9, instances=1)
    flags = list(itertools.product((False, True), repeat=3))
    for number, values in enumerate(flags, 2):
        node = config["nodes"][uuid_of("node", number)]
        node.update(zip(("master_candidate", "drained", "offline"), values, strict=True))
    with both_daemons(config) as (brine, port):
        asked: list[Question] = [
            (Asks.NODE_ROLE, node_name(number)) for number in range(1, len(flags) + 2)
        ]
        roles = [
            [heard.answer for heard in ask_for_answers(each, asked)] for each in (brine.port, port)
        ]
    assert roles[0] == roles[1]


DECLARED: Json = {
    "cluster": {
        "name": "prod.example.com",
        "master": "node1",
        "enabled_hypervisors": ["kvm", "xen-pvm"],
        "hvparams": {"kvm": {"migration_port": 8102}},
        "uid_pool": "4000-4099,5000",
        "volume_group_name": "vg0",
        "nicparams": {"link": "br0"},
        "tags": ["production"],
    },
    "nodes": {
        "node1.example.com": {"primary_ip": "192.0.2.1"},
        "node2.example.com": {"primary_ip": "192.0.2.2", "drained": True},
        "node3.example.com": {"primary_ip": "192.0.2.3", "offline": True},
        "node4.example.com": {"primary_ip": "2001:db8::4"},
    },
    "networks": {"lan": {"network": "10.0.0.0/24", "mac_prefix": "aa:00:07"}},
    "instances": {
        "web1.example.com": {
            "primary_node": "node1",
            "beparams": {"maxmem": 1024, "vcpus": 4},
            "hvparams": {"acpi": False},
            "nics": [
                {"ip": "10.0.0.5"},
                {"ip": "10.0.0.6", "network": "lan"},
                {"ip": "10.0.1.5", "nicparams": {"mode": "routed", "link": "br9"}},
                {},
            ],
            "disks": [{"size": 1024}, {"size": 2048, "mode": "ro"}],
            "tags": ["web"],
        },
        "db1.example.com": {
            "primary_node": "node4",
            "hypervisor": "xen-pvm",
            "hvparams": {"kernel_path": "/boot/vmlinuz"},
            "admin_state": "down",
            "disks": [],
        },
    },
}


CHANGED: Json = {
    "nodes": {"node5.example.com": {"primary_ip": "192.0.2.5"}},
    "instances": {
        "web1.example.com": {"admin_state": "offline", "nics": [{"ip": "10.0.0.7"}]},
        "db1.example.com": {
            "disks": [{"dev_type": "file", "size": 64, "logical_id": ["loop", "/srv/db1"]}]
        },
    },
}


def test_what_apply_makes_from_nothing_is_a_configuration_to_ganeti() -> None:
    with confd_process(reveal_secrets=True) as brine:
        store = ConfigStore(brine.config)
        apply_to(store, DECLARED)
        brine.start()
        with ganeti_beside(brine.folder) as port:
            both_are_right(brine, port)
        apply_to(store, CHANGED)
        # Started anew, since it would follow only at its next look, after 17 s: it watches a file
        # that lives on as a kept version.
        with ganeti_beside(brine.folder) as port:
            both_are_right(brine, port)


def apply_to(store: ConfigStore, declared: Json) -> None:
    """Run ``brine config apply``."""
    with store.writing() as writer:
        writer.write(apply(writer.current, declared).new)


def both_are_right(brine: Confd, ganeti_port: int) -> None:
    """Both answer, from the file as it is now, what is in it."""
    config = json.loads(brine.config.read_bytes())
    right = RightAnswers(config)
    asked: list[Question] = [(Asks.NODE_IPS, None), (Asks.MASTER_CANDIDATE_IPS, None)]
    asked += [(Asks.CLUSTER_MASTER, None), (Asks.INSTANCE_IPS, None), (Asks.INSTANCE_IPS, "br9")]
    for node in config["nodes"].values():
        asked += [(Asks.NODE_ROLE, node["name"]), (Asks.NODE_INSTANCES, node["name"])]
    for instance in config["instances"].values():
        asked.append((Asks.INSTANCE_DISKS, instance["name"]))
    for port in (brine.port, ganeti_port):
        serial = right.serial(Asks.NODE_IPS)
        wait_for("the configuration", functools.partial(has_serial, port, serial))
        for (what, query), heard in zip(asked, ask_for_answers(port, asked), strict=True):
            answer = heard.status, normal(what, heard.answer)
            assert answer == (0, right.answer(what, query)), (what, query)


def has_serial(port: int, serial: int) -> bool:
    """Whether a daemon answers from that configuration."""
    return ask(port, Asks.NODE_IPS).serial == serial


def test_both_daemons_follow_a_file_that_is_replaced() -> None:
    config = ganeti_config(nodes=3, instances=4)
    with both_daemons(config) as (brine, port):
        for serial in (50, 51, 52):
            config["cluster"]["serial_no"] = config["serial_no"] = serial
            config["nodes"][uuid_of("node", 2)]["primary_ip"] = f"192.0.2.{serial}"
            brine.write_config(config)
            for each in (brine.port, port):
                wait_for("the configuration", functools.partial(has_serial, each, serial))
                heard = ask(each, Asks.NODE_IP_OF_INSTANCE_IP, {"1": instance_ip(2)})
                assert heard.answer == f"192.0.2.{serial}"


def test_the_same_datagrams_meet_silence_at_both() -> None:
    good = confd_wire.request(SECRET, Asks.PING, None, "x")
    stale = json.loads(good[4:])
    stale["salt"] = str(int(stale["salt"]) - 400)
    forged = confd_wire.request(b"another key\n", Asks.PING, None, "x")
    with both_daemons(ganeti_config()) as (brine, port):
        for each in (brine.port, port):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                client.settimeout(20)
                client.connect(("127.0.0.1", each))
                for bad in (b"", b"plj0", b"plj1" + good[4:], good[:-1], forged, good[4:]):
                    client.send(bad)
                client.send(b"plj0" + json.dumps(stale).encode())
                client.send(confd_wire.request(SECRET, Asks.PING, None, "the only good one"))
                heard = confd_wire.opened(SECRET, client.recv(65536))
                assert heard.salt == "the only good one"
