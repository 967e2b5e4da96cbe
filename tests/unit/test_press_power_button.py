"""The script that presses a power button without a module of Brine's."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "pkgs/instance/system/press-power-button"


def press(path: Path, serve: Callable[[socket.socket], None]) -> subprocess.CompletedProcess[str]:
    """Run the script against a monitor that does `serve`."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        command = [sys.executable, "-I", "-S", str(SCRIPT), str(path)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as script:
            connection, _ = listener.accept()
            with connection:
                serve(connection)
            stdout, stderr = script.communicate()
    return subprocess.CompletedProcess(command, script.returncode, stdout, stderr)


def test_the_guest_is_asked_whether_it_is_paused_or_not(tmp_path: Path) -> None:
    heard: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        connection.sendall(b'{"QMP": {}}\n{"return": {}}\n{"event": "RESUME"}\n')
        connection.sendall(b'{"error": {"class": "GenericError"}}\n')
        connection.sendall(b'{"error": {"class": "GenericError"}}\n{"return": {}}\n')
        while chunk := connection.recv(1000):
            heard.append(chunk)

    done = press(tmp_path / "q", serve)
    assert (done.returncode, done.stderr) == (0, "")
    commands = ["qmp_capabilities", "cont", "system_wakeup", "system_powerdown"]
    said = [json.loads(line)["execute"] for line in b"".join(heard).splitlines()]
    assert said == commands


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_monitor_that_talks_without_end_is_left(tmp_path: Path, end: str) -> None:
    def serve(connection: socket.socket) -> None:
        with pytest.raises(OSError, match="reset|Broken pipe"):
            while True:
                connection.sendall(b"x" * 1000 + end.encode())

    done = press(tmp_path / "q", serve)
    assert (done.returncode, done.stderr) == (1, "press-power-button: QEMU has not answered\n")


def test_a_monitor_that_ends_is_no_fault(tmp_path: Path) -> None:
    started = threading.Event()
    done = press(tmp_path / "q", lambda _: started.set())
    assert started.is_set()
    assert done.returncode in (0, 1)
    assert "QEMU has not answered" not in done.stderr
