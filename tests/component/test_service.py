"""What the service manager hears, through systemd's own library and a real socket."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brine.common.systemd import ServiceManager


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The manager's end of the notification socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield end


@pytest.mark.parametrize(
    ("say", "heard"),
    [
        (lambda service: service.ready("fine"), b"READY=1\nSTATUS=fine"),
        (lambda service: service.status("watching 1"), b"STATUS=watching 1"),
        (lambda service: service.alive(), b"WATCHDOG=1"),
        (lambda service: service.reloading(), b"RELOADING=1"),
        (lambda service: service.stopping(), b"STOPPING=1"),
        (lambda service: service.discard("web1"), b"FDSTOREREMOVE=1\nFDNAME=web1"),
    ],
)
def test_each_message_arrives(
    manager: socket.socket, say: Callable[[ServiceManager], None], heard: bytes
) -> None:
    say(ServiceManager())
    assert manager.recv(4096) == heard


def test_a_descriptor_is_handed_over(manager: socket.socket) -> None:
    read_end, write_end = os.pipe()
    ServiceManager().store("web1", write_end)
    os.close(write_end)
    message, ancillary, *_ = manager.recvmsg(4096, socket.CMSG_SPACE(16))
    assert message == b"FDSTORE=1\nFDNAME=web1\nFDPOLL=0"
    (stored,) = array.array("i", ancillary[0][2])
    os.write(stored, b"x")
    os.close(stored)
    assert os.read(read_end, 10) == b"x"
    os.close(read_end)


def test_without_systemd_nothing_happens() -> None:
    service = ServiceManager({})
    service.ready("fine")
    service.alive()
    service.store("web1", 0)
    assert service.stored() == {}
    assert service.watchdog_s is None
    assert service.runtime_dir is None


def test_what_systemd_set_up_is_understood() -> None:
    environment = {
        "NOTIFY_SOCKET": "/x",
        "WATCHDOG_USEC": "30000000",
        "WATCHDOG_PID": str(os.getpid()),
        "RUNTIME_DIRECTORY": "/run/brine-kvmd",
    }
    service = ServiceManager(environment)
    assert service.watchdog_s == 30
    assert service.runtime_dir == Path("/run/brine-kvmd")
    assert ServiceManager({**environment, "WATCHDOG_PID": "1"}).watchdog_s is None
