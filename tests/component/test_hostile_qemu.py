"""Root's tools against a QEMU that its guest has taken over."""

from __future__ import annotations

import fcntl
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest

from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpClosedError
from brine.hotplug.relay import Relay
from lab.fake_qemu import Peer, played

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="giving up privileges takes some")

GROWTH_MIB = 32

# It asks one question directly and by the relay, and says how much it has grown by that, in KiB.
ASKS = """
import resource, sys, time
from pathlib import Path
from brine.common.errors import BrineError
from brine.common.qmp.client import QmpClient
from brine.hotplug.known_devices import devices_of
from brine.hotplug.qemu import Machine
from brine.hotplug.relay import Relay
from brine.vm.address import DeviceKind

path, limit_s = Path(sys.argv[1]), float(sys.argv[2])

def ask(through=None):
    with QmpClient.connect(path, through=through, timeout_s=2, limit_s=limit_s) as qmp:
        devices_of(Machine(qmp), DeviceKind.DISK, "web1")

def ask_by_relay():
    with Relay() as through:
        ask(through)

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for attempt in (ask, ask_by_relay):
    began = time.monotonic()
    try:
        attempt()
        print("answered")
    except BrineError as error:
        print("error:", str(error)[:200].replace(chr(10), " "))
    print("seconds:", time.monotonic() - began)
print("grown:", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


# The command `brine` of a tree that is not installed.
RUNS = """
import sys
from brine.common import cli
nouns = {"nic": "brine.hotplug.cli:NIC", "disk": "brine.hotplug.cli:DISK"}
found = {"brine.commands": [cli.EntryPoint(*noun) for noun in nouns.items()]}
cli.entry_points = lambda group: found.get(group, [])
sys.exit(cli.main())
"""

Talk = Callable[[Peer, str, int], None]


def qemu(path: Path, talk: Talk) -> AbstractContextManager[None]:
    """A QEMU that negotiates, and then says whatever *talk* does to each command."""

    def script(it: Peer) -> None:
        with suppress(OSError):  # whoever asked has had enough
            it.negotiate()
            while True:
                command = it.hear()
                talk(it, command["execute"], command["id"])

    return played(path, script)


def asked(path: Path, *, limit_s: float = 4) -> tuple[list[str], int]:
    """The result of each question, and the growth of the asking process, in MiB."""
    done = subprocess.run(
        [sys.executable, "-c", ASKS, str(path), str(limit_s)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    lines = done.stdout.splitlines()
    grown = int(lines.pop().removeprefix("grown: ")) >> 10
    return [line for line in lines if not line.startswith("seconds")], grown


DENSE = b"[" + b"{}," * 200_000 + b"{}]"  # 600 kB, and 25 times as much when it is read


def floods_with_events(it: Peer, command: str, number: int) -> None:
    event = b'{"event": "X", "data": {"x": ' + DENSE[:60_000] + b"{}]}}\n"
    while True:
        it.say(event)


def answers_without_end(it: Peer, command: str, number: int) -> None:
    while True:
        it.say(b"x" * 65536)


def answers_large_lists(it: Peer, command: str, number: int) -> None:
    head, tail = b'{"id": %d, "return": ' % number, b"}\n"
    it.say(head + DENSE + tail)


def has_thousands_of_devices_with_large_serials(it: Peer, command: str, number: int) -> None:
    if command == "qom-list":
        rows = [
            {"name": f"disk-{one:08x}-pci-1", "type": "child<virtio-blk-pci>"}
            for one in range(8000)
        ]
        it.say({"id": number, "return": rows})
    elif command == "query-fdsets":
        it.say({"id": number, "return": []})
    else:
        it.say({"id": number, "return": "s" * 700_000})


def answers_each_question_late(it: Peer, command: str, number: int) -> None:
    if command == "qom-list":
        has_thousands_of_devices_with_large_serials(it, command, number)
        return
    time.sleep(0.5)
    it.say({"id": number, "return": [] if command == "query-fdsets" else "serial"})


@pytest.mark.parametrize(
    "talk",
    [
        floods_with_events,
        answers_without_end,
        answers_large_lists,
        has_thousands_of_devices_with_large_serials,
        answers_each_question_late,
    ],
)
def test_no_vm_makes_who_asks_it_large_or_late(tmp_path: Path, talk: Talk) -> None:
    path = tmp_path / "web1.qmp"
    with qemu(path, talk):
        outcomes, grown_mib = asked(path)
    assert len(outcomes) == 2
    # A list of what is no device is an answer, however large.
    may_answer = talk is answers_large_lists
    assert all(one.startswith("error: ") or may_answer for one in outcomes), outcomes
    assert grown_mib <= GROWTH_MIB


def children() -> set[str]:
    """This process's, by their ids."""
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def test_what_talks_to_a_qemu_for_the_garbage_collector_may_do_nothing(tmp_path: Path) -> None:
    path = tmp_path / "web1.qmp"

    def talk(it: Peer, command: str, number: int) -> None:
        if command == "getfd":
            it.say(b"this is no QMP\n")
        it.say({"id": number, "return": {"name": "web1"}})

    def work(relay: Relay) -> None:
        with (tmp_path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = children()
            with QmpClient.connect(path, through=relay) as qmp:
                assert qmp.execute("query-name") == {"name": "web1"}
                assert qmp.peer_process() == os.getpid()
                (child,) = children() - before
                status = dict(
                    line.split(":\t", 1)
                    for line in Path(f"/proc/{child}/status").read_text().splitlines()
                )
                assert status["Uid"].split() == status["Gid"].split() == ["65534"] * 4
                assert status["Groups"].split() == []
                assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
                opened = [os.readlink(one) for one in Path(f"/proc/{child}/fd").iterdir()]
                assert sorted(one.partition(":")[0] for one in opened) == ["socket", "socket"]
                with pytest.raises(QmpClosedError):
                    qmp.execute("getfd", descriptors=[lock.fileno()])

    with qemu(path, talk), Relay() as relay:
        work(relay)


SHAPES: list[object] = [
    None,
    5,
    "x",
    [],
    {},
    [5],
    [{}],
    [[]],
    {"a": 1},
    [{"fds": 5}],
    [{"name": {}, "type": []}],
]
# A number that JSON has, and that is no whole one.
SHAPES += [[{"fdset-id": float("inf"), "fds": [{"opaque": "x"}]}], float("inf")]


def test_no_answer_of_another_shape_is_more_than_an_error_of_that_vm(tmp_path: Path) -> None:
    path = tmp_path / "web1.qmp"
    answers = itertools.cycle(SHAPES)

    def talk(it: Peer, command: str, number: int) -> None:
        if command == "qom-list":
            rows = [{"name": "disk-0a000000-pci-1", "type": "child<virtio-blk-pci>"}]
            it.say({"id": number, "return": rows})
        else:
            it.say({"id": number, "return": next(answers)})

    with qemu(path, talk):
        for _ in SHAPES:
            outcomes, _ = asked(path)
            assert len(outcomes) == 2, outcomes


def says_nothing(it: Peer, command: str, number: int) -> None:
    it.hear()  # the asker goes away


def says_what_is_no_qmp(it: Peer, command: str, number: int) -> None:
    it.say(b"\xff\x1b]0;x\x07 {\n")


def ends_at_once(it: Peer, command: str, number: int) -> None:
    raise BrokenPipeError


def nests_too_deep(it: Peer, command: str, number: int) -> None:
    it.say(b'{"id": %d, "return": ' % number + b"[" * 100_000 + b"]" * 100_000 + b"}\n")


MAC = "aa:00:00:00:00:01"
CALLS = [
    ["nic", "list"],
    ["disk", "list"],
    ["disk", "add", "--path", "disk"],
    ["disk", "remove", "disk"],
    ["nic", "remove", MAC],
]


@pytest.mark.parametrize(
    "talk",
    [
        says_what_is_no_qmp,
        ends_at_once,
        nests_too_deep,
        pytest.param(answers_large_lists, marks=pytest.mark.long),
        pytest.param(says_nothing, marks=pytest.mark.long),
        pytest.param(floods_with_events, marks=pytest.mark.long),
        pytest.param(answers_without_end, marks=pytest.mark.long),
    ],
)
def test_each_command_ends_at_a_hostile_qemu_in_lines_of_its_own(
    tmp_path: Path, talk: Talk
) -> None:
    """Five calls against seven kinds of it, each at a socket of its own."""
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(1 << 20))

    def call(number: int) -> subprocess.CompletedProcess[str]:
        noun, verb, *rest = CALLS[number]
        path, runtime = tmp_path / f"{number}.qmp", tmp_path / f"{number}.json"
        runtime.write_text('{"nics": [], "disks": []}')
        options = [str(disk) if one == "disk" else one for one in rest]
        options += [] if verb == "list" else ["--runtime", str(runtime), "--timeout", "1"]
        with qemu(path, talk):
            return subprocess.run(
                [sys.executable, "-c", RUNS, noun, verb, *options, "--qmp", str(path)],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
                env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
            )

    with ThreadPoolExecutor(len(CALLS)) as pool:
        for done in pool.map(call, range(len(CALLS))):
            lines = done.stderr.splitlines()
            told = f"{done.args[3:]}: {done.returncode}, {done.stdout[:500]}, {done.stderr[:500]}"
            assert done.returncode in (0, 1), told
            assert (done.returncode == 0) is not any("brine: error: " in one for one in lines), told
            assert all(one.startswith("brine: ") and one.isprintable() for one in lines), told
            assert len(done.stderr) < 10_000, told
