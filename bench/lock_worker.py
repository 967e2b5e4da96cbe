"""What runs in processes of its own for the benchmark of locks; it imports nothing of the others.

``threads LIBRARY``: pairs of acquire and release within a process. ``clients SOCKET``: clients of
``brine-lockd``, played by one process. ``echo``: a server that has an answer at once.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

NAMES = 500
"""So many has a set of locks."""
LISTENER = 3
"""The descriptor of a server's socket, as systemd passes it."""

_NAMES = [f"instance{number:03}" for number in range(NAMES)]
_BATCHES = 5
_RELEASE = b'{"release": true}\n'
_GRANTED, _RELEASED = b'{"granted": true}\n', b'{"released": true}\n'


def main(role: str, *arguments: str) -> None:
    """Do as the first argument says, and write the results as JSON."""
    found: Mapping[str, float] = {}
    match role:
        case "threads":
            found = _threads(arguments[0], int(arguments[1]))
        case "clients":
            found = {"pair": _clients(arguments[0], int(arguments[1]), float(arguments[2]))}
        case "library":
            found = {"pair": _library(arguments[0], int(arguments[1]))}
        case "echo":
            _echo()
    json.dump(found, sys.stdout)


# ---- within a process


def _threads(library: str, pairs: int) -> Mapping[str, float]:
    """Seconds of a pair, of a shared one, and of a set, in the best of a few batches."""
    match library:
        case "ours":
            locks = import_module("brine.cluster.locks")
            return _of_locks(locks.SharedLock, pairs) | _of_set(locks.LockSet(_NAMES), pairs)
        case "peer":
            make = import_module("ganeti.locking").SharedLock
            return _of_locks(make, pairs) | _of_each(make, pairs)
        case _:
            return {"pair": _best(_pair(threading.Lock()), pairs)} | _of_each(
                lambda _: threading.Lock(), pairs
            )


def _of_locks(make: Callable[[str], Any], pairs: int) -> dict[str, float]:
    lock = make("web1")
    return {"pair": _best(_pair(lock), pairs), "shared": _best(_pair(lock, shared=True), pairs)}


def _of_set(locks: Any, pairs: int) -> dict[str, float]:
    def pair() -> None:
        locks.acquire(_NAMES)
        locks.release()

    return {"set": _best(pair, pairs // len(_NAMES))}


def _of_each(make: Callable[[str], Any], pairs: int) -> dict[str, float]:
    """Of locks that no set has: the least that a set of them would do."""
    locks = {name: make(name) for name in _NAMES}

    def pair() -> None:
        names = sorted(_NAMES)
        for name in names:
            locks[name].acquire()
        for name in names:
            locks[name].release()

    return {"set": _best(pair, pairs // len(_NAMES))}


def _pair(lock: Any, **how: bool) -> Callable[[], None]:
    def pair() -> None:
        lock.acquire(**how)
        lock.release()

    return pair


def _best(work: Callable[[], None], count: int) -> float:
    """Seconds of one of *count*, in the best batch: others may be at work, too."""
    took = []
    for _ in range(_BATCHES):
        began_at = time.perf_counter()
        for _ in range(count):
            work()
        took.append(time.perf_counter() - began_at)
    return min(took) / count


# ---- across processes


def _clients(path: str, count: int, seconds: float) -> float:
    """Seconds of a pair: all that *count* clients have had, each of another lock, in that time."""
    epoll = select.epoll()
    clients: dict[int, tuple[socket.socket, bytes]] = {}
    for number in range(count):
        client = socket.socket(socket.AF_UNIX)
        client.connect(path)
        claim = {"claim": [f"instance/web{number}"], "purpose": "bench", "timeout_s": None}
        line = json.dumps(claim).encode() + b"\n"
        clients[client.fileno()] = client, line
        epoll.register(client, select.EPOLLIN)
        client.send(line)
    pairs, now = 0, time.perf_counter()
    began_at, end = now, now + seconds
    while now < end or not pairs:
        for descriptor, _ in epoll.poll():
            client, line = clients[descriptor]
            answer = client.recv(4096)
            if answer == _GRANTED:
                client.send(_RELEASE)
            elif answer == _RELEASED:
                pairs += 1
                client.send(line)
            else:
                raise SystemExit(f"a strange answer: {answer!r}")
        now = time.perf_counter()
    return (now - began_at) / pairs


def _library(path: str, pairs: int) -> float:
    """Seconds of a pair by the library, one after the other."""
    client = import_module("brine.cluster.lock_client").LockClient(Path(path))

    def pair() -> None:
        client.claim(["instance/web1"], purpose="bench")
        client.release()

    return _best(pair, pairs)


def _echo() -> None:
    """Answer each message as brine-lockd would where all locks are free, and have none."""
    epoll = select.epoll()
    listener = socket.socket(fileno=LISTENER)
    epoll.register(listener, select.EPOLLIN)
    clients: dict[int, socket.socket] = {}
    while True:
        for descriptor, _ in epoll.poll():
            if descriptor == LISTENER:
                client, _ = listener.accept()
                clients[client.fileno()] = client
                epoll.register(client, select.EPOLLIN)
                continue
            client = clients[descriptor]
            try:
                message = client.recv(4096)
                client.send(_RELEASED if message == _RELEASE else _GRANTED)
            except OSError:  # it is gone
                clients.pop(descriptor).close()


if __name__ == "__main__":
    main(*sys.argv[1:])
