"""Network namespaces of this process: real kernel networks that end with the test."""

from __future__ import annotations

import ctypes
import os
import selectors
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from brine.common import paths

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_SOL_PACKET = 263
_PACKET_AUXDATA = 8
_VLAN_VALID = 0x10
_VIRTIO_HEADER = 10  # bytes before a frame
_ETHERTYPE_TEST = 0x88B5  # for experiments within a house, RFC 5342


class Namespace:
    """A network namespace that is entered and left by the thread that made it."""

    def __init__(self) -> None:
        home = _open_current()
        _call("unshare", _CLONE_NEWNET)
        self._descriptor = _open_current()
        _enter(home)
        os.close(home)
        with self.entered():
            ip("link set lo up")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be in it: what this thread opens or starts meanwhile stays there."""
        before = _open_current()
        _enter(self._descriptor)
        try:
            yield
        finally:
            _enter(before)
            os.close(before)

    @property
    def path(self) -> str:
        """Its name for `ip link set ... netns`."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def ip(self, command: str) -> str:
        """Run an `ip` command in it."""
        with self.entered():
            return ip(command)

    def close(self) -> None:
        os.close(self._descriptor)


def ip(command: str, *, program: str = "ip") -> str:
    """Run an `ip` command, written as in a shell, and return what it says."""
    done = subprocess.run([program, *command.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{program} {command}: {done.stderr}"
    return done.stdout


def bridge(command: str) -> str:
    """Run a `bridge` command."""
    return ip(command, program="bridge")


@contextmanager
def new_namespace() -> Iterator[Namespace]:
    """A namespace that this thread is in until the context ends."""
    namespace = Namespace()
    try:
        with namespace.entered():
            yield namespace
    finally:
        namespace.close()


def can_filter_vlans() -> bool:
    """Whether this machine's kernel has bridges that look at VLANs."""
    with new_namespace():
        command = ["ip", "link", "add", "br0", "type", "bridge", "vlan_filtering", "1"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Frame:
    """A frame as it was seen on a wire; `vlan` is its tag, or None."""

    payload: bytes
    vlan: int | None


class Wire:
    """Sees and sends frames of the test on an interface."""

    def __init__(self, interface: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._socket.setsockopt(_SOL_PACKET, _PACKET_AUXDATA, 1)
        self._socket.bind((interface, 0))
        self._socket.settimeout(10)

    def next(self) -> Frame:
        """The next frame of the test."""
        while True:
            data, ancillary, *_ = self._socket.recvmsg(2000, 200)
            if data[12:14] == struct.pack("!H", _ETHERTYPE_TEST):
                return Frame(data[14:].rstrip(b"\0"), _tag(ancillary))

    def send(self, payload: bytes, *, vlan: int | None = None) -> None:
        self._socket.send(_frame(payload, vlan))

    def close(self) -> None:
        self._socket.close()


def _frame(payload: bytes, vlan: int | None) -> bytes:
    """A broadcast of the test's."""
    tag = b"" if vlan is None else struct.pack("!HH", 0x8100, vlan)
    head = b"\xff" * 6 + bytes.fromhex("525400000001") + tag + struct.pack("!H", _ETHERTYPE_TEST)
    return head + payload.ljust(46, b"\0")


def send_frame(queue: int, payload: bytes, *, vlan: int | None = None) -> None:
    """Send a frame by a tap's descriptor, as its guest."""
    os.write(queue, bytes(_VIRTIO_HEADER) + _frame(payload, vlan))


def read_frame(queue: int) -> Frame:
    """The next frame of the test that a tap's descriptor gives."""
    with selectors.DefaultSelector() as selector:
        selector.register(queue, selectors.EVENT_READ)
        while True:
            assert selector.select(10), "no frame came"
            data = os.read(queue, 2000)[_VIRTIO_HEADER:]
            vlan = None
            if data[12:14] == b"\x81\x00":
                vlan = struct.unpack("!H", data[14:16])[0] & 0xFFF
                data = data[:12] + data[16:]
            if data[12:14] == struct.pack("!H", _ETHERTYPE_TEST):
                return Frame(data[14:].rstrip(b"\0"), vlan)


@contextmanager
def pumped(one: int, other: int) -> Iterator[None]:
    """Frames pass between two taps' descriptors, as a QEMU passes them to its guest."""
    stop_read, stop_write = os.pipe()

    def pump() -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(one, selectors.EVENT_READ, other)
            selector.register(other, selectors.EVENT_READ, one)
            selector.register(stop_read, selectors.EVENT_READ, None)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    try:
                        os.write(key.data, os.read(key.fd, 65536))
                    except BlockingIOError:
                        continue
                    except OSError:  # an interface that is down takes no frames
                        continue

    thread = threading.Thread(target=pump)
    thread.start()
    try:
        yield
    finally:
        os.write(stop_write, b"x")
        thread.join()
        os.close(stop_read)
        os.close(stop_write)


def talks(source: Namespace, target: Namespace, address: str, *, own: str = "") -> str:
    """Whether a datagram from one namespace to an address of another gets there and back.

    Returns the address that it came from, as the other saw it. `own` is the source's address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with target.entered():
        there = socket.socket(family, socket.SOCK_DGRAM)
    with source.entered():
        here = socket.socket(family, socket.SOCK_DGRAM)
    with there, here:
        there.bind((address, 7007))
        there.settimeout(10)
        here.settimeout(10)
        if own:
            here.bind((own, 0))
        here.sendto(b"hello", (address, 7007))
        _, sender = there.recvfrom(100)
        there.sendto(b"hello yourself", sender)
        assert here.recvfrom(100)[0] == b"hello yourself"
        return str(sender[0])


def _tag(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    for level, kind, data in ancillary:
        if (level, kind) == (_SOL_PACKET, _PACKET_AUXDATA):
            status, *_, tag, _ = struct.unpack("IIIHHHH", data[:20])
            if status & _VLAN_VALID:
                return int(tag) & 0xFFF
    return None


def _open_current() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(descriptor: int) -> None:
    _call("setns", descriptor, _CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def add_script(name: str, text: str) -> Path:
    """An operator's script."""
    paths.NIC_SCRIPTS_DIR.mkdir(exist_ok=True, mode=0o755)
    script = paths.NIC_SCRIPTS_DIR / name
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    return script
