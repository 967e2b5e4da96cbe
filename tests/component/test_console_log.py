"""A real QEMU and its guest's serial line, with and without a process that logs it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from brine.common import paths
from brine.instance.kvm.command_line import DiskFiles, Resources, qemu_args
from brine.instance.kvm.layout import layout_of
from brine.instance.kvm.resources import open_pipe
from brine.instance.serial_log import read_log
from brine.instance.store import InstanceError
from brine.instance.validate import completed
from brine.vm.files import InstanceFiles
from brine.vm.spec import NOT_CONFINED
from lab.guest_image import guest_image
from lab.waiting import wait_for

_READER = """
import sys
from pathlib import Path
from brine.common import paths
paths.CONSOLE_DIR, paths.CONSOLE_LOG_DIR = map(Path, sys.argv[1:3])
from brine.instance.service.console_log import main
main()
"""
_BOOTED_S = 120


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONTROL_DIR", "CONSOLE_DIR", "CONSOLE_LOG_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(paths, name, tmp_path / name)


def reader() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _READER]
    command += map(str, (paths.CONSOLE_DIR, paths.CONSOLE_LOG_DIR))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, env=environment)


@contextmanager
def guest() -> Iterator[socket.socket]:
    """A guest, and the line that one has who is attached to it."""
    image = guest_image().folder
    boot = {"kernel": f"{image}/kernel", "initrd": f"{image}/initramfs"}
    spec = completed(
        {"name": "web1", "accel": "tcg", "append": "console=ttyS0 quiet", **boot, **NOT_CONFINED}
    )
    InstanceFiles("web1").unit.parent.mkdir(exist_ok=True)
    writer = open_pipe("web1")
    os.set_inheritable(writer, True)
    log = DiskFiles(0, [writer], is_device=False)
    opened = {kind: os.open(path, os.O_RDONLY) for kind, path in boot.items()}
    arguments = qemu_args(spec, layout_of(spec), Resources(boot=opened, console_log=log))
    qemu = subprocess.Popen(arguments, pass_fds=[writer, *opened.values()])
    for descriptor in (writer, *opened.values()):
        os.close(descriptor)
    try:
        with socket.socket(socket.AF_UNIX) as line:
            address = str(InstanceFiles("web1").serial)
            # The socket is there a moment before somebody listens.
            wait_for("the serial line", lambda: line.connect_ex(address) == 0, timeout_s=30)
            line.settimeout(_BOOTED_S)
            yield line
    finally:
        qemu.kill()
        qemu.wait()


def logged() -> bytes:
    with suppress(InstanceError):
        return read_log("web1")
    return b""


def says(line: socket.socket, order: str) -> None:
    """Give an order, and wait until the guest has answered that it does not know it."""
    line.sendall(f"{order}\n".encode())
    heard = b""
    while f"no such order: {order}".encode() not in heard:
        heard += line.recv(4096)


def test_what_a_guest_says_is_logged_and_no_end_of_the_reader_holds_it_up() -> None:
    first = reader()
    with guest() as line:
        wait_for("the guest", lambda: b"guest: ready" in logged(), timeout_s=_BOOTED_S)
        first.kill()
        first.wait()
        says(line, "unheard")
        second = reader()
        numbers = iter(range(1000))

        def is_read() -> bool:
            says(line, f"again {next(numbers)}")
            return b"no such order: again" in logged()

        wait_for("the next reader", is_read, timeout_s=60, interval_s=0.2)
    assert b"unheard" not in logged()
    second.send_signal(signal.SIGTERM)
    assert second.wait(30) == 0
