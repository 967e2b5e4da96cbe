"""Where a process listens, by the kernel's tables."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from brine.instance.listing import listens_at
from lab.stand_in import StandIn


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_each_place_of_this_process_is_found(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener, socket.socket(family) as silent:
        try:
            listener.bind((host, 0))
            silent.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        listener.listen()
        place = (host, listener.getsockname()[1])
        assert place in listens_at(os.getpid())
        assert (host, silent.getsockname()[1]) not in listens_at(os.getpid())
        with StandIn() as other:
            assert place not in listens_at(other.pid)
    assert place not in listens_at(os.getpid())


def test_of_what_can_not_be_seen_nothing_is_known(tmp_path: Path) -> None:
    assert listens_at(4711, proc=tmp_path) == []
