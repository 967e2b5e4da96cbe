"""A terminal on a VM's serial line: a real process on a real terminal, and a socket as QEMU's."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.waiting import wait_for

_PROGRAM = """
import sys
from pathlib import Path
from brine.common import process as instance_units
from brine.common.errors import BrineError, die
from brine.instance.console import attach
instance_units.runs_in = lambda *_: sys.argv[2:] != ["stranger"]
try:
    sys.exit(attach("web1", Path(sys.argv[1])))
except BrineError as error:
    die("brine", error, 1)
"""
_WAY_OUT = b"\x1d"
_PATIENCE_S = 20.0


class Terminal:
    """A person's terminal: what is typed, and what is seen."""

    def __init__(self) -> None:
        self._person, self.tty = os.openpty()
        os.set_blocking(self._person, False)
        self.seen = b""

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self.tty)

    def is_raw(self) -> bool:
        return not self.settings()[3] & (termios.ICANON | termios.ECHO | termios.ISIG)

    def type(self, data: bytes) -> None:
        """Type all of it, however long the terminal takes to take it."""
        deadline = time.monotonic() + _PATIENCE_S
        while data:
            left_s = deadline - time.monotonic()
            assert left_s > 0, "nobody reads what is typed"
            if select.select([], [self._person], [], left_s)[1]:
                data = data[os.write(self._person, data) :]

    def wait(self, wanted: bytes) -> bytes:
        """Wait until something is to be seen; what was before it."""
        deadline = time.monotonic() + _PATIENCE_S
        while wanted not in self.seen:
            left_s = deadline - time.monotonic()
            assert left_s > 0, self.seen
            if select.select([self._person], [], [], left_s)[0]:
                self.seen += os.read(self._person, 4096)
        before, _, self.seen = self.seen.partition(wanted)
        return before

    def close(self) -> None:
        os.close(self._person)
        os.close(self.tty)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    it = Terminal()
    yield it
    it.close()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as it:
        it.bind(str(tmp_path / "serial"))
        it.listen(1)
        it.settimeout(_PATIENCE_S)
        yield it


class Attached:
    """A process that has joined a terminal and a line, and the VM's end of that."""

    def __init__(self, path: Path, *, stdin: Any, stdout: Any, stderr: Any) -> None:
        command = [sys.executable, "-c", _PROGRAM, str(path)]
        environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, env=environment
        )

    @classmethod
    def on(cls, terminal: Terminal, path: Path) -> Attached:
        tty = terminal.tty
        return cls(path, stdin=tty, stdout=tty, stderr=tty)

    def serve(self, listener: socket.socket) -> socket.socket:
        vm, _ = listener.accept()
        vm.settimeout(_PATIENCE_S)
        return vm

    def status(self) -> int:
        try:
            return self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def receive(vm: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := vm.recv(size - len(data))):
        data += more
    return data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "serial"


def test_all_keys_go_there_and_all_bytes_come_back(
    terminal: Terminal, listener: socket.socket, path: Path
) -> None:
    attached = Attached.on(terminal, path)
    vm = attached.serve(listener)
    terminal.wait(b"Connected to web1. Ctrl-] leaves.\r\n")
    vm.sendall(b"login: ")
    terminal.wait(b"login: ")
    keys = b"ro\x7fot\r\x03\x1a\x04\x1c\x11\x13\xc3\xa9"  # none of them is the terminal's own
    terminal.type(keys)
    assert receive(vm, len(keys)) == keys
    shown = bytes(range(256)) + b"a\nb"  # a line end is the VM's to make
    vm.sendall(shown + b"END")
    assert terminal.wait(b"END") == shown
    terminal.type(_WAY_OUT)
    assert attached.status() == 0


def test_ctrl_bracket_leaves_and_the_vm_does_not_see_it(
    terminal: Terminal, listener: socket.socket, path: Path
) -> None:
    before = terminal.settings()
    attached = Attached.on(terminal, path)
    vm = attached.serve(listener)
    terminal.wait(b"leaves.")
    vm.sendall(b"x")
    terminal.wait(b"x")
    assert terminal.is_raw()
    terminal.type(b"bye" + _WAY_OUT + b"rm -rf /\r")
    assert attached.status() == 0
    terminal.wait(b"Left.")
    assert terminal.settings() == before
    assert receive(vm, 100) == b"bye"


@pytest.mark.parametrize("typed", [b"", b"not read by anybody"])
def test_the_end_of_the_vm_is_told(
    terminal: Terminal, listener: socket.socket, path: Path, typed: bytes
) -> None:
    before = terminal.settings()
    attached = Attached.on(terminal, path)
    vm = attached.serve(listener)
    vm.sendall(b"reboot: Power down\r\n")
    terminal.wait(b"reboot: Power down\r\n")
    if typed:
        terminal.type(typed)
        assert select.select([vm], [], [], _PATIENCE_S)[0]
    vm.close()  # the other end hears of a reset if it has typed
    assert attached.status() == 0
    terminal.wait(b"The VM has ended.")
    assert terminal.settings() == before


def test_there_is_a_way_out_of_a_vm_that_does_not_read(
    terminal: Terminal, listener: socket.socket, path: Path
) -> None:
    attached = Attached.on(terminal, path)
    vm = attached.serve(listener)
    terminal.wait(b"leaves.")
    vm.sendall(b"x")
    terminal.wait(b"x")
    terminal.type(b"pasted\r" * 100_000)  # more than a socket holds
    vm.sendall(b"still here")
    terminal.wait(b"still here")
    terminal.type(_WAY_OUT)
    assert attached.status() == 0
    terminal.wait(b"Left.")


def test_a_script_hears_on_when_it_has_said_all(listener: socket.socket, path: Path) -> None:
    pipe = subprocess.PIPE
    attached = Attached(path, stdin=pipe, stdout=pipe, stderr=pipe)
    vm = attached.serve(listener)
    assert attached.process.stdin
    assert attached.process.stdout
    assert attached.process.stderr
    attached.process.stdin.write(b"dmesg\n")
    attached.process.stdin.close()
    assert receive(vm, 6) == b"dmesg\n"
    vm.sendall(b"\x00answer\n")
    vm.close()
    assert attached.process.stdout.read() == b"\x00answer\n"
    assert attached.status() == 0
    assert attached.process.stderr.read() == b""  # none of what is for people


def test_a_script_that_says_much_is_heard_to_the_end(listener: socket.socket, path: Path) -> None:
    pipe = subprocess.PIPE
    said = b"0123456789" * 100_000
    attached = Attached(path, stdin=pipe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    vm = attached.serve(listener)
    assert attached.process.stdin
    with attached.process.stdin as stdin:
        os.set_blocking(stdin.fileno(), False)
        rest, heard = said, b""
        while len(heard) < len(said):
            writes = [stdin] if rest else []
            readable, writable, _ = select.select([vm], writes, [], _PATIENCE_S)
            assert readable or writable
            if writable:
                rest = rest[os.write(stdin.fileno(), rest) :]
            if readable:
                heard += vm.recv(65536)
    assert heard == said
    vm.close()
    assert attached.status() == 0


@pytest.mark.parametrize("bound", [False, True])
def test_no_line_is_told_with_what_may_be_missing(
    terminal: Terminal, path: Path, *, bound: bool
) -> None:
    before = terminal.settings()
    if bound:
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(path))
    attached = Attached.on(terminal, path)
    assert attached.status() == 1
    reason = b"Connection refused" if bound else b"No such file or directory"
    terminal.wait(b"brine: error: web1: %s: %s\r\n" % (bytes(path), reason))
    terminal.wait(b'"serial_console": true')
    assert terminal.settings() == before


def test_as_many_wait_for_the_line_as_may(
    terminal: Terminal, listener: socket.socket, path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        for one in (first, second):
            one.connect(str(path))
        attached = Attached.on(terminal, path)
        assert attached.status() == 1
    terminal.wait(b"others wait already")


@pytest.mark.parametrize("leaves", [False, True])
def test_who_comes_second_waits_or_leaves(
    terminal: Terminal, listener: socket.socket, path: Path, *, leaves: bool
) -> None:
    with socket.socket(socket.AF_UNIX) as first:
        first.connect(str(path))
        served, _ = listener.accept()
        attached = Attached.on(terminal, path)
        terminal.wait(b"attached to web1")
        terminal.wait(b"Waiting ... Ctrl-] leaves.\r\n")
        if leaves:
            wait_for("the terminal to be raw", terminal.is_raw)
            terminal.type(_WAY_OUT)
            assert attached.status() == 0
        served.close()
    if not leaves:
        attached.serve(listener)
        terminal.wait(b"Connected to web1. Ctrl-] leaves.\r\n")
        terminal.type(_WAY_OUT)
        assert attached.status() == 0


def test_without_a_terminal_or_a_pipe_there_is_nothing_to_join(
    listener: socket.socket, path: Path
) -> None:
    command = 'exec "$0" -c "$1" "$2" <&-'
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, _PROGRAM, str(path)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=_PATIENCE_S,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("brine: error: web1: a console needs standard input")
