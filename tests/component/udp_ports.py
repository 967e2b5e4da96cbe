"""UDP ports for those that must have one of a known number, or none behind it."""

from __future__ import annotations

import errno
import itertools
import os
import socket

# Below those that the kernel gives to whoever asks for any: net.ipv4.ip_local_port_range.
_FIRST, _LAST = 20_000, 32_000
_MOST_WORKERS = 16
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _MOST_WORKERS
_PORTS = itertools.cycle(range(_FIRST + _WORKER, _LAST, _MOST_WORKERS))
_TRIES = 100


def free_port() -> int:
    """A UDP port that nobody has, on any address; nobody gets it who doesn't ask for this one.

    :raises OSError: if there is none.
    """
    for port in itertools.islice(_PORTS, _TRIES):
        if _is_free(port):
            return port
    raise OSError(errno.EADDRINUSE, f"none of {_TRIES} UDP ports is free")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as trial:
        trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            trial.bind(("::", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True
