"""The QMP client and a real QEMU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpClosedError, QmpCommandError, QmpTimeoutError
from lab.guest import Guest, start_guest
from lab.machine import Host
from lab.traces import descriptor_links


@pytest.fixture
def guest() -> Iterator[Guest]:
    with (
        tempfile.TemporaryDirectory(prefix="qmp-") as folder,
        start_guest(Host(), "web", control_dir=folder) as guest,
    ):
        yield guest


def test_commands_events_and_the_end(guest: Guest) -> None:
    with QmpClient.connect(guest.qmp_socket) as qmp:
        assert qmp.execute("query-name")["name"] == "web"
        qmp.execute("stop")
        event = qmp.next_event(timeout_s=30)
        assert event
        assert event.name == "STOP"
        with pytest.raises(QmpCommandError) as refused:
            qmp.execute("device_del", {"id": "nothing"})
        assert refused.value.error_class == "DeviceNotFound"
        qmp.execute("quit")
        event = qmp.next_event(timeout_s=30)
        assert event
        assert event.data["reason"] == "host-qmp-quit"
        with pytest.raises(QmpClosedError):
            qmp.next_event(timeout_s=30)


def test_descriptors_are_qemus_own_copies(guest: Guest) -> None:
    def pipes_of_qemu() -> int:
        return sum(link.startswith("pipe:") for link in descriptor_links(guest.pid))

    with QmpClient.connect(guest.qmp_socket) as qmp:
        before = pipes_of_qemu()
        read_end, write_end = os.pipe()
        qmp.execute("getfd", {"fdname": "ours"}, descriptors=[write_end])
        os.close(write_end)
        assert pipes_of_qemu() == before + 1
        qmp.execute("closefd", {"fdname": "ours"})
        assert os.read(read_end, 1) == b"", "QEMU has closed the only copy"
        os.close(read_end)


def test_a_second_client_waits_and_is_told_why(guest: Guest) -> None:
    with QmpClient.connect(guest.qmp_socket) as first:
        with pytest.raises(QmpTimeoutError, match="no greeting within") as late:
            with QmpClient.connect(guest.qmp_socket, timeout_s=0.3):
                pass
        assert "one at a time" in (late.value.hint or "")
        assert first.execute("query-status")
