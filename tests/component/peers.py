"""VMs of a running kvmd that a test plays by hand, to do what no QEMU would do on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from component.kvmd_process import Kvmd
from lab.fake_qemu import Peer, event_line


def poweroff() -> bytes:
    return event_line("SHUTDOWN", guest=True, reason="guest-shutdown")


def user_ends(kvmd: Kvmd, it: Peer, *, times: int = 1) -> None:
    """Have the user of a VM shut it down, and see the verdict: number *times* on that name."""
    it.say(poweroff())
    assert kvmd.verdict(it.path.stem, times) == "user, guest-shutdown"


@contextmanager
def peer(kvmd: Kvmd, name: str, *, listen: bool = True) -> Iterator[Peer]:
    it = Peer(kvmd.control / f"{name}.kvmd", listen=listen)
    try:
        yield it
    finally:
        it.end()


@contextmanager
def watched(kvmd: Kvmd, name: str, *, times: int = 1) -> Iterator[Peer]:
    """A VM that is watched: number *times* of that name."""
    with peer(kvmd, name) as it:
        it.negotiate()
        kvmd.watches(name, times)
        yield it


@contextmanager
def pouring(it: Peer, data: bytes) -> Iterator[None]:
    """The peer sends *data* over and over, as fast as it is read."""
    connection = it.connection
    assert connection
    connection.setblocking(False)
    over = threading.Event()

    def pour() -> None:
        unsent = data
        while not over.is_set():
            try:
                unsent = unsent[connection.send(unsent) :] or data
            except BlockingIOError:
                time.sleep(0.0005)

    thread = threading.Thread(target=pour)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def two_of_one_name(kvmd: Kvmd) -> Iterator[tuple[Peer, Peer]]:
    """A VM, and a newer one whose socket took the place of its own; both are watched."""
    with watched(kvmd, "web") as old:
        old.path.unlink()
        with watched(kvmd, "web", times=2) as new:
            yield old, new
