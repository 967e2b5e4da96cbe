"""VMs come and go while the daemon is killed again and again, or the journal hangs: not one wrong
verdict, and none is lost.

300 endings by scripted peers, 20 by real guests, on a real systemd.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.command import CommandError
from lab.fake_qemu import FakeQemus
from lab.guest import start_guest
from lab.guest_endings import ENDINGS
from lab.node import Node
from lab.waiting import wait_for
from node.kvmd_on_node import kvmd_pid

CONTROL = "/run/brine/ctrl"
SCRIPTED_ENDINGS = 300
GUEST_ENDINGS = 20


@dataclass(frozen=True)
class Script:
    """How a peer ends: events with pauses between them, the last of which is its end.

    :param stopping: whether the admin says so before.
    :param killed: whether the end is a killed QEMU's, after the events.
    """

    verdict: tuple[str, str]
    events: tuple[tuple[str, dict[str, object]], ...] = ()
    stopping: bool = False
    killed: bool = False


def _shutdown(reason: str, *, guest: bool) -> tuple[str, dict[str, object]]:
    return "SHUTDOWN", {"guest": guest, "reason": reason}


_POWEROFF = _shutdown("guest-shutdown", guest=True)

SCRIPTS = [
    Script(("user", "guest-shutdown"), (_POWEROFF,)),
    Script(("user", "guest-shutdown"), (("STOP", {}), ("RESUME", {}), _POWEROFF)),
    Script(("user", "guest-shutdown"), (("RESET", {"guest": True}), _POWEROFF)),
    Script(("admin", "powerdown"), (("POWERDOWN", {}), _POWEROFF)),
    Script(("admin", "stopping"), (_POWEROFF,), stopping=True),
    Script(("admin", "stopping"), killed=True, stopping=True),
    Script(("admin", "host-signal"), (_shutdown("host-signal", guest=False),)),
    Script(("admin", "host-qmp-quit"), (("STOP", {}), _shutdown("host-qmp-quit", guest=False))),
    Script(("admin", "paused"), (("STOP", {}),), killed=True),
    Script(("crash", "eof"), killed=True),
    Script(("crash", "eof"), (("POWERDOWN", {}),), killed=True),
    Script(("crash", "guest-panic"), (("GUEST_PANICKED", {"action": "pause"}),), killed=True),
    Script(("crash", "guest-reset"), (_shutdown("guest-reset", guest=True),)),
]


def _play(node: Node, qemus: FakeQemus, name: str, seed: int) -> tuple[str, tuple[str, str]]:
    """One peer's life; returns its name and the verdict that is right."""
    rng = random.Random(seed)
    script = rng.choice(SCRIPTS)
    time.sleep(rng.uniform(0, 1))
    peer = qemus.start(_control(node) / f"{name}.kvmd", listen_delay_s=rng.choice([0, 0, 0.2]))
    peer.wait_connected(180)
    time.sleep(rng.uniform(0, 1))
    if script.stopping:
        (_control(node) / f"{name}.stopping").touch()
    last = len(script.events) - 1
    for number, (event, data) in enumerate(script.events):
        if number == last and not script.killed:
            peer.emit_last(event, **data)
        else:
            peer.emit(event, **data)
            time.sleep(rng.uniform(0, 0.5))
    if script.killed:
        peer.kill()
    return name, script.verdict


GUEST_ENDS = [ENDINGS[name] for name in ("poweroff", "powerdown", "term", "quit", "kill")]


def _live(node: Node, name: str, number: int) -> tuple[str, tuple[str, str]]:
    """One real guest's life; returns its name and the verdict that is right."""
    ending = GUEST_ENDS[number % len(GUEST_ENDS)]
    with start_guest(node, name) as guest:
        guest.wait_ready(120)
        ending.act(guest)
        guest.wait()
    return name, ending.verdict


def _kill_again_and_again(node: Node, done: threading.Event, rng: random.Random) -> int:
    """Kill or restart the daemon at random moments; returns how often."""
    kills = 0
    while not done.wait(rng.uniform(0.2, 2.5)):
        pid = kvmd_pid(node)
        try:
            if rng.random() < 0.2:
                node.run(["systemctl", "restart", "brine-kvmd.service"])
            elif pid != "0":
                node.run(["kill", "-KILL", pid])
        except CommandError:
            continue  # it ended by itself in between, as told a moment before
        kills += 1
    return kills


@contextmanager
def _finally(act: Callable[[], object]) -> Iterator[None]:
    """Do that in the end, come what may."""
    try:
        yield
    finally:
        act()


def _control(node: Node) -> Path:
    return node.path(CONTROL)


@pytest.mark.long
def test_no_verdict_is_wrong_while_the_daemon_is_killed_at_random(wired_node: Node) -> None:
    node = wired_node
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    node.run(["systemctl", "start", "brine-kvmd.service"])
    done = threading.Event()
    # As the unit of a QEMU would have it, so that the group of the control directory may connect.
    umask = os.umask(0o007)
    with (
        _finally(lambda: os.umask(umask)),
        FakeQemus() as qemus,
        ThreadPoolExecutor(60) as pool,
        _finally(done.set),
    ):
        killer = pool.submit(_kill_again_and_again, node, done, random.Random(rng.random()))
        scripted = [
            pool.submit(_play, node, qemus, f"script{number}", rng.randrange(1 << 32))
            for number in range(SCRIPTED_ENDINGS)
        ]
        with ThreadPoolExecutor(4) as few:  # two processors do not run more at once
            guests = [
                few.submit(_live, node, f"guest{number}", number) for number in range(GUEST_ENDINGS)
            ]
            right = dict(future.result() for future in [*scripted, *guests])
        done.set()
        kills = killer.result()
        given = wait_for(
            "all verdicts",
            lambda: (found := _given(node)) and right.keys() <= found.keys() and found,
            timeout_s=30,
            interval_s=0.5,
        )
    assert isinstance(given, dict)
    wrong = {
        name: (given[name], verdict) for name, verdict in right.items() if given[name] != {verdict}
    }
    assert wrong == {}
    assert len(right) == SCRIPTED_ENDINGS + GUEST_ENDINGS
    assert kills >= 5
    marked = {path.name.removesuffix(".shutdown") for path in _control(node).glob("*.shutdown")}
    assert marked & right.keys() == {name for name, (who, _) in right.items() if who == "user"}


def _given(node: Node) -> dict[str, set[tuple[str, str]]]:
    """All verdicts of the node, by instance: a daemon killed while it gives one repeats it."""
    given: dict[str, set[tuple[str, str]]] = {}
    for record in node.journal("BRINE_EVENT=verdict"):
        verdict = (record["BRINE_VERDICT"], record["BRINE_CAUSE"])
        given.setdefault(record["BRINE_INSTANCE"], set()).add(verdict)
    return given


@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.long)])
def test_no_verdict_is_late_or_lost_while_the_journal_hangs(wired_node: Node, count: int) -> None:
    node = wired_node
    node.run(["systemctl", "start", "brine-kvmd.service"])
    names = {f"late{count}-{number}" for number in range(count)}
    umask = os.umask(0o007)
    with _finally(lambda: os.umask(umask)), FakeQemus() as qemus:
        peers = [qemus.start(_control(node) / f"{name}.kvmd") for name in sorted(names)]
        for peer in peers:
            peer.wait_connected(180)
        node.run(["systemctl", "kill", "--signal=STOP", "systemd-journald"])
        with _finally(lambda: node.run(["systemctl", "kill", "--signal=CONT", "systemd-journald"])):
            for peer in peers:
                peer.emit_last("SHUTDOWN", guest=True, reason="guest-shutdown")
            wait_for(
                "all to count as shut down",
                lambda: names <= {one.stem for one in _control(node).glob("late*.shutdown")},
                timeout_s=150,
                interval_s=0.2,
            )
    # Those that the journal had no room for are in markers.
    wait_for(
        "all verdicts to be listed",
        lambda: names <= {one["instance"] for one in _listed(node)},
        timeout_s=150,
        interval_s=1,
    )
    ours = [one for one in _listed(node) if one["instance"] in names]
    assert {(one["verdict"], one["cause"]) for one in ours} == {("user", "guest-shutdown")}
    assert len(ours) == count


def _listed(node: Node) -> list[dict[str, Any]]:
    """The verdicts that the command lists."""
    found = node.run(["brine", "kvmd", "verdicts", "--json"]).stdout
    return json.loads(found)  # type: ignore[no-any-return]
