"""The configuration daemon as its clients and its administrator meet it."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from brine.common.figures import FILE_NAME, read_figures
from brine.confd.protocol import (
    LARGEST_DATAGRAM,
    ConfdReply,
    ErrorCode,
    HmacKey,
    ReplyStatus,
    RequestType,
    pack_request,
)
from component.confd_process import KEY, SECRET, Client, Confd, confd_process, is_alive
from component.daemon_process import ROOT, memory_kib
from component.udp_ports import free_port
from lab.ganeti_config import ganeti_config, instance_name, node_name, uuid_of
from lab.waiting import wait_for

OTHER_KEY = HmacKey(b"another secret\n")


@pytest.fixture
def confd() -> Iterator[Confd]:
    """A running confd, for a cluster of three nodes and four instances."""
    with confd_process(ganeti_config()) as process:
        process.start()
        yield process


def configuration(serial: int, **sizes: int) -> dict[str, Any]:
    """A configuration whose answers have this serial."""
    made = ganeti_config(serial=serial, **sizes)
    made["cluster"]["serial_no"] = serial
    return made


def a_request(*, key: HmacKey = KEY, age_s: float = 0.0, salt: str = "salt") -> bytes:
    """A ping, sent some time ago."""
    return pack_request(RequestType.PING, None, salt, key, now_s=time.time() - age_s)


# Answers.


@pytest.mark.parametrize(
    ("bind", "hosts"),
    [
        ("::", ["127.0.0.1", "::1"]),
        ("127.0.0.1 ::1", ["127.0.0.1", "::1"]),
        ("0.0.0.0 ::", ["127.0.0.1", "::1"]),
        ("::1", ["::1"]),
    ],
)
def test_it_listens_on_ipv4_and_ipv6(bind: str, hosts: list[str]) -> None:
    with confd_process(ganeti_config(), bind=bind, workers=2) as confd:
        confd.start()
        for host in hosts:
            for _ in range(4):  # of several ports, some go to the other worker
                assert confd.client(host).ask(RequestType.CLUSTER_MASTER).answer == node_name(1)


def test_the_largest_answer_arrives_whole_and_a_larger_one_is_a_signed_error() -> None:
    large = configuration(3)
    text = "x" * (LARGEST_DATAGRAM - 400)
    large["cluster"]["tags"] = [text, "y" * 1000]
    with confd_process(large) as confd:
        confd.start()
        assert confd.ask(RequestType.CONFIG, "/cluster/tags/0").answer == text
        reply = confd.ask(RequestType.CONFIG, "/cluster/tags")
        assert reply == ConfdReply(ReplyStatus.ERROR, ErrorCode.TOO_LARGE, 3)


def test_figures_tell_the_serial_and_count_queries_and_refusals(confd: Confd) -> None:
    confd.ask(RequestType.CLUSTER_MASTER)
    confd.client().expect_silence(b"plj0{}")

    def are_counted() -> bool:
        found = read_figures(confd.state / FILE_NAME)
        assert found
        refused = sum(count for _, count in found.rows("refused", 1))
        return found.is_running and bool(found.number("answered")) and refused == 1

    wait_for("both to be counted", are_counted)
    found = read_figures(confd.state / FILE_NAME)
    assert found
    assert found.number("serial") == confd.ask(RequestType.CLUSTER_MASTER).serial


# Silence.


def test_strangers_meet_silence(confd: Confd) -> None:
    good = a_request()
    confd.client().expect_silence(
        b"",
        b"plj0",
        b"plj1" + good[4:],
        good[4:],
        b"plj0{}",
        b"plj0[]",
        b"plj0null",
        b'plj0{"msg": 5, "salt": "", "hmac": ""}',
        b'plj0{"msg": "", "salt": "", "hmac": "\xff"}',
        b'plj0{"msg": "\\ud800", "salt": "1", "hmac": "\\u00e9"}',
        b"plj0" + b"[" * 60000,
        a_request(key=OTHER_KEY),
        *(good[:length] for length in range(0, len(good), 7)),
        os.urandom(2000),
        b"\0" * 65000,
    )


def test_a_recorded_request_can_not_be_made_an_amplifier() -> None:
    """Not by another worker, after a reload, or with a new configuration, either."""
    with confd_process(configuration(1, nodes=60), workers=2) as confd:
        confd.start()
        recorded = pack_request(RequestType.NODE_IPS, None, "salt", KEY, now_s=time.time())
        client = confd.client()
        client.send(recorded)
        assert len(client.receive()) > 3 * len(recorded)
        for _ in range(20):  # from many ports, so that both workers get some
            confd.client().expect_silence(recorded)
        confd.reload_whole()
        confd.client().expect_silence(recorded)
        confd.write_config(configuration(2, nodes=60))
        wait_for("the new one", lambda: confd.ask(RequestType.CONFIG, "/serial_no").serial == 2)
        confd.client().expect_silence(recorded)
        assert len(confd.ask(RequestType.NODE_IPS).answer) == 60
        confd.stop()
        counted = re.findall(r"not answered: (\d+) repeated; the last from", "\n".join(confd.log()))
        assert sum(map(int, counted)) == 22


def test_secrets_are_answered_only_where_settings_say_so() -> None:
    secret, private = "6d3b9f", "a password"
    data = ganeti_config(nodes=3, instances=10)
    mirrored = uuid_of("instance", 10)
    disk = data["disks"][data["instances"][mirrored]["disks"][0]]
    disk["logical_id"][5] = secret
    data["instances"][mirrored]["osparams_private"] = {"root": private}
    data["cluster"]["osparams_private_cluster"] = {"noop": {"root": private}}
    questions: list[tuple[int, Any, str]] = [
        (RequestType.INSTANCE_DISKS, instance_name(10), secret),
        (RequestType.CONFIG, f"/disks/{disk['uuid']}", secret),
        (RequestType.CONFIG, f"/disks/{disk['uuid']}/logical_id/5", secret),
        (RequestType.CONFIG, f"/instances/{mirrored}", private),
        (RequestType.CONFIG, f"/instances/{mirrored}/osparams_private/root", private),
        (RequestType.CONFIG, "/cluster", private),
        (RequestType.CONFIG, "", private),
        (RequestType.NODE_INSTANCES, node_name(1), private),
    ]

    with confd_process(data) as confd:

        def told() -> list[bool]:
            return [word in json.dumps(confd.ask(*asked).answer) for *asked, word in questions]

        confd.start()
        assert told() == [False] * len(questions)
        identity = confd.ask(RequestType.CONFIG, f"/disks/{disk['uuid']}/logical_id").answer
        assert identity == [*disk["logical_id"][:5], None]
        confd.reload_whole(reveal_secrets=True)
        assert told() == [True] * len(questions)
        confd.configure()
        confd.reload_whole()
        assert told() == [False] * len(questions)


@pytest.mark.parametrize("hundreds", [100, pytest.param(1200, marks=pytest.mark.long)])
def test_mutated_datagrams_meet_silence(confd: Confd, hundreds: int) -> None:
    """Ten thousand requests or more, each with something wrong somewhere in it."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    client = confd.client()
    for _ in range(hundreds):
        good = a_request(salt=f"{dice.random()}")
        client.expect_silence(*(mutated(good, dice) for _ in range(100)))
    assert len(confd.log("ERROR")) == 0
    assert len(confd.log("not answered")) <= 2 + hundreds // 100


def mutated(good: bytes, dice: random.Random) -> bytes:
    """A datagram that is no longer the one that was signed, by its letters and digits at least."""
    significant = [place for place, byte in enumerate(good) if chr(byte).isalnum()]
    place = dice.choice(significant)
    other = bytes([dice.randrange(256)])
    match dice.randrange(4):
        case 0:
            wrong = good[:place] + other + good[place + 1 :]
        case 1:
            wrong = good[:place] + good[place + 1 :]
        case 2:
            wrong = good[:place]
        case _:
            wrong = good[:place] + b"x" + good[place:]
    return b"" if wrong == good else wrong


def test_a_flood_of_junk_costs_few_lines_and_no_memory(confd: Confd) -> None:
    client = confd.client()
    client.expect_silence(*[b"junk"] * 100)
    (worker,) = confd.workers()
    before_kib = memory_kib(worker, "RssAnon")
    for number in range(300):
        noise = os.urandom(50).hex().encode()
        client.expect_silence(*[b"plj0" + noise, a_request(key=OTHER_KEY, salt=f"{number}")] * 50)
    assert memory_kib(worker, "RssAnon") - before_kib < 1024
    confd.wait_logged("not answered: ")
    confd.stop()
    lines = confd.log("not answered: ")
    assert len(lines) <= 3
    assert "wrong signature" in lines[-1]
    assert "from 127.0.0.1" in lines[-1]


def test_a_sender_of_ipv4_is_named_as_such_where_ipv6_listens() -> None:
    with confd_process(ganeti_config(), bind="::") as confd:
        confd.start()
        confd.client("127.0.0.1").send(b"junk")
        confd.wait_logged("not answered: ")
        (line,) = confd.log("not answered: ")
        assert "the last from 127.0.0.1" in line


# The configuration changes.


def test_a_new_configuration_is_answered_from(confd: Confd) -> None:
    confd.write_config(configuration(7, instances=9))
    wait_for(
        "the new answer",
        lambda: (
            confd.ask(RequestType.INSTANCE_PRIMARY_NODE, instance_name(9)).status == ReplyStatus.OK
        ),
    )
    assert confd.ask(RequestType.CLUSTER_MASTER).serial == 7
    wait_for("the status", lambda: "serial 7: 3 nodes, 9 instances" in confd.status())


def test_a_file_written_in_place_is_found_too(confd: Confd) -> None:
    with confd.config.open("wb") as file:
        file.write(json.dumps(configuration(8)).encode())
    wait_for("the new serial", lambda: confd.ask(RequestType.CLUSTER_MASTER).serial == 8)


@pytest.mark.parametrize(
    ("data", "trouble"),
    [
        (b"", "the file is empty|not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid UTF-8"),
        (b"[1]", "no configuration"),
        (json.dumps(configuration(9))[:-2000].encode(), "not valid JSON"),
        (json.dumps({**configuration(9), "nodes": 5}).encode(), "/nodes"),
    ],
)
def test_a_corrupt_configuration_leaves_the_old_one_in_use(
    confd: Confd, data: bytes, trouble: str
) -> None:
    confd.write_config(data)
    line = confd.wait_logged("the old one stays in use")
    assert any(text in line for text in trouble.split("|")), line
    wait_for("the status", lambda: "TROUBLE" in confd.status())
    assert confd.ask(RequestType.CLUSTER_MASTER) == ConfdReply(ReplyStatus.OK, node_name(1), 1)

    confd.write_config(configuration(10))
    wait_for("the new serial", lambda: confd.ask(RequestType.CLUSTER_MASTER).serial == 10)
    wait_for("the status", lambda: "TROUBLE" not in confd.status())


def test_an_older_configuration_is_refused(confd: Confd) -> None:
    confd.write_config(configuration(12))
    wait_for("the new serial", lambda: confd.ask(RequestType.CLUSTER_MASTER).serial == 12)
    confd.write_config(configuration(11))
    confd.wait_logged("serial 11 is older than 12")
    assert confd.ask(RequestType.CLUSTER_MASTER).serial == 12


def test_without_a_configuration_it_says_so_until_there_is_one() -> None:
    with confd_process() as confd:
        confd.start()
        assert "no configuration" in confd.status()
        assert confd.ask(RequestType.PING) == ConfdReply(ReplyStatus.ERROR, ErrorCode.INTERNAL)
        confd.write_config(configuration(2))
        wait_for("an answer", lambda: confd.ask(RequestType.PING).status == ReplyStatus.OK)
        confd.config.unlink()
        confd.wait_logged("is gone; the old one stays in use")
        assert confd.ask(RequestType.CLUSTER_MASTER).serial == 2


def test_a_hundred_changes_under_load() -> None:
    """Each answer is that of some version, none goes back, and no request is lost."""
    with confd_process(configuration(100, instances=40), workers=2) as confd:
        confd.start()
        descriptors = confd.descriptors()
        over = threading.Event()
        seen: list[set[int]] = [set(), set(), set()]
        faults: list[str] = []

        def ask_on(number: int) -> None:
            newest = 0
            client = confd.client()
            try:
                while not over.is_set():
                    if number == 0:  # from a new port each time, so of either worker
                        client.close()
                        client = Client("127.0.0.1", confd.port)
                    name = client.ask(RequestType.CONFIG, "/cluster/cluster_name")
                    if name.answer != f"cluster{name.serial}" and name.serial != 100:
                        faults.append(f"{name} is of no version")
                    if name.serial < newest:
                        faults.append(f"{name.serial} after {newest}")
                    newest = name.serial
                    seen[number].add(newest)
            except Exception as error:  # in a thread it would pass unseen
                faults.append(repr(error))

        threads = [threading.Thread(target=ask_on, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for serial in range(101, 201):
            changed = configuration(serial, instances=40)
            changed["cluster"]["cluster_name"] = f"cluster{serial}"
            confd.write_config(changed)
            if serial % 10 == 0:
                wait_for("the version", lambda serial=serial: serial in seen[1])  # type: ignore[misc]
        wait_for("the last version", lambda: all(200 in serials for serials in seen) or faults)
        over.set()
        for thread in threads:
            thread.join()
        assert not faults
        assert len(set.union(*seen)) > 10
        confd.close_clients()
        wait_for("old workers to go", lambda: len(confd.workers()) == 2)
        wait_for("theirs to be closed", lambda: confd.descriptors() == descriptors)


# Keys and settings change.


def test_two_keys_are_valid_while_one_replaces_the_other(confd: Confd) -> None:
    confd.write_key(confd.previous_key_file, SECRET)
    confd.write_key(confd.key_file, b"another secret\n")
    confd.reload()
    confd.wait_logged("2 of 2 possible keys")
    confd.wait_logged("settings and keys reloaded")
    for key in (KEY, OTHER_KEY):
        client = confd.client(key=key)
        assert client.ask(RequestType.PING).status == ReplyStatus.OK  # signed with the asker's key

    os.utime(confd.previous_key_file, (time.time() - 3 * 86400 - 60,) * 2)
    confd.reload_whole()
    text = "a previous key is valid, too, for 3 days now"
    wait_for("the status", lambda: text in confd.status())

    confd.previous_key_file.unlink()
    confd.reload_whole()
    wait_for("the status", lambda: "previous" not in confd.status())
    client = confd.client(key=OTHER_KEY)
    client.expect_silence(a_request(key=KEY))


def test_a_short_key_is_warned_about(confd: Confd) -> None:
    assert not any("bytes only" in line for line in confd.log())
    confd.write_key(confd.key_file, b"15 bytes of key")
    confd.reload()
    confd.wait_logged(f"{confd.key_file} has 15 bytes only")
    confd.wait_logged("settings and keys reloaded")
    client = confd.client(key=HmacKey(b"15 bytes of key"))
    assert client.ask(RequestType.PING).status == ReplyStatus.OK


@pytest.mark.parametrize("secret", [None, b""])
def test_a_key_that_is_gone_leaves_the_old_one_in_use(confd: Confd, secret: bytes | None) -> None:
    confd.key_file.unlink()
    if secret is not None:
        confd.write_key(confd.key_file, secret)
    confd.reload()
    confd.wait_logged("nothing reloaded, all stays as it was")
    wait_for("the status", lambda: "nothing reloaded" in confd.status())
    assert confd.ask(RequestType.PING).status == ReplyStatus.OK


def test_the_number_of_workers_changes_at_a_reload(confd: Confd) -> None:
    for count in (3, 1, 2):
        confd.configure(workers=count)
        confd.reload()
        wait_for("the workers", lambda count=count: len(confd.workers()) == count)  # type: ignore[misc]
        for _ in range(10):
            assert confd.ask(RequestType.PING).status == ReplyStatus.OK
    wait_for("the status", lambda: "2 workers" in confd.status())


def test_the_port_changes_at_a_reload(confd: Confd) -> None:
    old, confd.port = confd.port, free_port()
    confd.reload_whole(bind="::")
    assert confd.client("::1").ask(RequestType.PING).status == ReplyStatus.OK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", old))  # it was given back


def test_a_port_that_is_taken_leaves_the_old_one_in_use(confd: Confd) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        confd.configure(port=other.getsockname()[1])
        confd.reload()
        confd.wait_logged("nothing reloaded, all stays as it was: can't listen on 127.0.0.1")
    assert confd.ask(RequestType.PING).status == ReplyStatus.OK


# What can't start.


def start_fails(confd: Confd) -> tuple[int, str]:
    """Start it, and see it end; its exit status and what it said."""
    confd.launch({})
    status = confd.wait_ended()
    return status, "\n".join(confd.log())


def test_a_second_daemon_on_the_port_ends_with_a_clear_error(confd: Confd) -> None:
    with confd_process(ganeti_config()) as second:
        for bind in ("127.0.0.1", "::", "0.0.0.0"):
            second.configure(port=confd.port, bind=bind)
            status, said = start_fails(second)
            assert status == 1
            assert "Address already in use" in said
            assert "hint: see who has the port" in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bind": ""}, "names no address"),
        ({"bind": "localhost"}, "has 'localhost'"),
        ({"workers": 0}, "must be at least 1"),
        ({"port": 70000}, "must be at most 65535"),
        ({"prot": 1814}, "did you mean port?"),
    ],
)
def test_bad_settings_are_a_clear_error(settings: dict[str, object], said: str) -> None:
    with confd_process(ganeti_config(), **settings) as confd:
        status, log = start_fails(confd)
        assert status == 2
        assert said in log


def test_no_key_is_a_clear_error() -> None:
    with confd_process(ganeti_config()) as confd:
        confd.key_file.unlink()
        status, log = start_fails(confd)
        assert status == 2
        assert "hint: brine confd new-key" in log
        assert SECRET.decode().strip() not in log


# Processes that end, and hang.


def test_a_worker_that_hangs_is_replaced(confd: Confd) -> None:
    (worker,) = confd.workers()
    os.kill(worker, signal.SIGSTOP)
    confd.wait_logged("hangs: replacing it", timeout_s=30)
    assert confd.ask(RequestType.PING).status == ReplyStatus.OK
    assert not is_alive(worker)


def test_a_worker_that_hangs_does_not_hold_up_a_new_configuration(confd: Confd) -> None:
    (worker,) = confd.workers()
    os.kill(worker, signal.SIGSTOP)
    confd.write_config(configuration(5))
    wait_for("the new serial", lambda: confd.ask(RequestType.CLUSTER_MASTER).serial == 5)
    wait_for("the end of the old worker", lambda: not is_alive(worker))


def test_workers_end_with_the_daemon(confd: Confd) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        workers = confd.workers()
        assert workers
        confd.stop(number)
        wait_for("them to end", lambda workers=workers: not any(map(is_alive, workers)))  # type: ignore[misc]
        confd.start()
        assert confd.ask(RequestType.PING).status == ReplyStatus.OK


def test_the_watchdog_is_fed(confd: Confd) -> None:
    confd.stop()
    confd.start(WATCHDOG_USEC="300000")
    fed = confd.manager.heard("WATCHDOG")
    wait_for("more", lambda: confd.manager.heard("WATCHDOG") > fed + 2)


def test_memory_is_locked_on_request(confd: Confd) -> None:
    assert memory_kib(confd.pid, "VmLck") == 0
    confd.reload_whole(memory_lock=True)
    assert memory_kib(confd.pid, "VmLck") > 1000
    (worker,) = confd.workers()
    wait_for("the worker's", lambda: memory_kib(worker, "VmLck") > 1000)


def test_without_descriptors_for_new_workers_the_old_ones_go_on(confd: Confd) -> None:
    """And the change is made up for when there are some again."""
    usual = resource.prlimit(confd.pid, resource.RLIMIT_NOFILE)
    # One to read the file with and two for a first pipe, but no more.
    few = max(int(name) for name in os.listdir(f"/proc/{confd.pid}/fd")) + 4
    resource.prlimit(confd.pid, resource.RLIMIT_NOFILE, (few, usual[1]))
    workers, descriptors = confd.workers(), confd.descriptors()
    confd.write_config(configuration(6))
    confd.wait_logged("no process for a worker: Too many open files; the old one stays in use")
    wait_for("the status", lambda: "TROUBLE" in confd.status())
    assert confd.ask(RequestType.CLUSTER_MASTER).serial == 1
    wait_for(
        "all to be as before",
        lambda: (confd.workers(), confd.descriptors()) == (workers, descriptors),
    )

    os.kill(workers[0], signal.SIGKILL)
    confd.wait_logged("ended: SIGKILL")
    resource.prlimit(confd.pid, resource.RLIMIT_NOFILE, usual)
    wait_for("the new serial", lambda: confd.ask(RequestType.CLUSTER_MASTER).serial == 6)
    wait_for("the status", lambda: "TROUBLE" not in confd.status())


def test_a_reload_while_it_starts_is_no_end() -> None:
    with confd_process(configuration(3, nodes=100, instances=5000)) as confd:
        confd.launch({})
        confd.wait_logged("possible keys")
        for _ in range(50):
            confd.reload()
        wait_for("it to be ready", lambda: confd.manager.heard("READY"))
        confd.reload_whole()
        assert confd.ask(RequestType.CLUSTER_MASTER).serial == 3


# The keys that root hands over.


def test_handed_over_keys_come_first(confd: Confd) -> None:
    """As ``systemctl reload`` does it: root copies, the daemon reads the copies."""
    confd.write_key(confd.key_file, b"another secret\n")
    confd.write_key(confd.previous_key_file, SECRET)
    os.utime(confd.previous_key_file, (time.time() - 7500,) * 2)
    hand_over(confd)
    confd.key_file.unlink()
    confd.previous_key_file.unlink()
    confd.reload()
    confd.wait_logged("2 of 2 possible keys")
    wait_for("its status", lambda: "for 2 hours now" in confd.status())
    confd.wait_logged("settings and keys reloaded")
    for key in (KEY, OTHER_KEY):
        assert confd.client(key=key).ask(RequestType.PING).status == ReplyStatus.OK


def hand_over(confd: Confd) -> None:
    """Run the step of the reload that root does."""
    parts = ("common", "vm", "config", "confd")
    subprocess.run(
        [sys.executable, "-m", "brine.confd.main", "--config", confd.settings, "--hand-over-keys"],
        env={
            **os.environ,
            "PYTHONPATH": ":".join(f"{ROOT}/pkgs/{part}" for part in parts),
            "RUNTIME_DIRECTORY": str(confd.state),
        },
        check=True,
    )
    for name in ("hmac.key", "hmac.key.previous"):
        status = Path(confd.state, name).stat()
        assert (status.st_mode & 0o777, status.st_uid) == (0o400, confd.state.stat().st_uid)


def test_many_configurations_leave_no_memory_behind() -> None:
    with confd_process(configuration(1, nodes=100, instances=1000)) as confd:
        confd.start()
        used_kib = []
        for serial in range(2, 32):
            confd.write_config(configuration(serial, nodes=100, instances=1000))
            wait_for("it", lambda serial=serial: confd.ask(RequestType.NODE_IPS).serial == serial)  # type: ignore[misc]
            used_kib.append(memory_kib(confd.pid, "RssAnon"))
        # One of them takes 5 MB.
        assert max(used_kib[15:]) - max(used_kib[:15]) < 5000
