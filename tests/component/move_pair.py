"""Two QEMUs on this host as the two sides of a live move. Their guest is a boot sector, which
counts and writes to its memory all the time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpError
from brine.instance.kvm.command_line import DiskFiles, Resources, qemu_args
from brine.instance.kvm.layout import layout_of, with_slots
from brine.instance.kvm.moved_command import moved_command
from brine.instance.kvm.resources import open_resources
from brine.instance.validate import completed
from brine.moves import channel
from brine.moves.channel import MEMORY
from brine.moves.incoming import Incoming
from brine.moves.migration import MoveError, MoveOptions, QemuGoneError
from brine.moves.move_key import KeyFolder
from brine.moves.outgoing import Outgoing
from brine.vm.address import DeviceKind
from brine.vm.runtime_file import Runtime
from brine.vm.spec import Spec
from cluster_key import new_key
from lab.images import node_image
from lab.runtime_file import write_runtime_file
from lab.waiting import wait_for

NAME = "web1"
HERE = "127.0.0.1"
MIB = 1 << 20
DISK_MIB = 2
WAIT_S = 60.0

# It writes 448 KiB again and again, each time another number. QEMU's emulation sees only the first
# write to a page that is in the processor's cache of addresses, so that is emptied each time.
_CODE = (
    "fa 31f6 fc"  # cli; xor si, si; cld
    "0f20c0 663500000100 0f22c0"  # from: mov eax, cr0; xor eax, 0x10000; mov cr0, eax
    "46 89f0 bb0020"  # inc si; mov ax, si; mov bx, 0x2000
    "8ec3 31ff b90080 f3ab"  # segment: mov es, bx; xor di, di; mov cx, 0x8000; rep stosw
    "81c30010 81fb0090 75ed ebd9"  # add bx, 0x1000; cmp bx, 0x9000; jne segment; jmp from
)
_BOOT_SECTOR = bytes.fromhex(_CODE).ljust(510, b"\0") + b"\x55\xaa"


class PairQemu:
    """A QEMU of a pair.

    :param program: that runs it; empty is the spec's.
    """

    def __init__(self, folder: Path, command: Sequence[str], given: Resources) -> None:
        self.folder = folder
        self.socket = folder / "ctrl" / f"{NAME}.qmp"
        self._log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            command,
            pass_fds=list(_descriptors(given)),
            stdout=self._log,
            stderr=self._log,
            env=_environment(command),
        )
        self.ended_at: float | None = None
        self._events = ExitStack()
        wait_for("QEMU to answer", self._answers, timeout_s=WAIT_S)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.said()
        events = self.folder / "ctrl" / f"{NAME}.kvmd"
        with contextlib.suppress(QmpError):
            self.events = self._events.enter_context(QmpClient.connect(events))
            self.started_at = time.time()
            return True
        return False

    def said(self) -> str:
        return (self.folder / "log").read_text()

    def connect(self) -> Any:
        return QmpClient.connect(self.socket, timeout_s=WAIT_S)

    def execute(self, command: str, **arguments: Any) -> Any:
        with self.connect() as qmp:
            return qmp.execute(command, arguments)

    def human(self, line: str) -> str:
        return str(self.execute("human-monitor-command", **{"command-line": line}))

    def io(self, device: str, request: str) -> str:
        """Read or write as a guest does; returns what QEMU printed of it."""
        before = len(self.said())
        self.human(f'qemu-io -d {device} "{request}"')
        return self.said()[before:]

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def state(self) -> str:
        """Its run state; empty if it has ended, or hangs."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] == "T":
                return ""
        with contextlib.suppress(QmpError):
            return str(self.execute("query-status")["status"])
        return ""

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> int:
        """Wait for its end; returns its status."""
        status = self.process.wait(WAIT_S)
        self.ended_at = self.ended_at or time.time()
        return status

    def runs(self) -> list[tuple[float, float]]:
        """When its guest ran, by its own events; the first of a source is before those."""
        at = None if "-S" in self.process.args else self.started_at  # type: ignore[operator]
        found = []
        for name, when in self._heard():
            if name == "RESUME" and at is None:
                at = when
            elif name in ("STOP", "SHUTDOWN") and at is not None:
                found.append((at, when))
                at = None
        if at is not None:
            found.append((at, self.ended_at or time.time()))
        return found

    def _heard(self) -> Iterator[tuple[str, float]]:
        with contextlib.suppress(QmpError):
            while event := self.events.next_event(timeout_s=0.2):
                yield event.name, (event.time_usec or 0) / 1e6

    def close(self) -> None:
        if self.is_alive():
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)
        self._events.close()
        self._log.close()


class Pair:
    """A guest with a disk, and a QEMU that waits for it.

    :param folder: gets a folder for each side.
    :param is_shared: both have the same disk; otherwise the target has an empty one.
    :param encrypted: whether there is a key.
    :param qemus: the programs of both sides.
    :param machine: the type of both.
    """

    def __init__(
        self,
        folder: Path,
        *,
        is_shared: bool = False,
        encrypted: bool = False,
        options: MoveOptions | None = None,
        qemus: tuple[str, str] = ("", ""),
        **keys: Any,
    ) -> None:
        self.options = options or MoveOptions()
        self.is_claimed = False
        self.key = new_key()
        self._stack = ExitStack()
        boot, there = folder / "boot", folder / "there"
        boot.write_bytes(_BOOT_SECTOR.ljust(DISK_MIB * MIB, b"\1"))
        there.write_bytes(bytes(DISK_MIB * MIB))
        given: dict[str, Any] = {
            "name": NAME,
            "machine": "pc-i440fx-7.2",
            "accel": "tcg",
            "cpu": "qemu64",
            "memory_mib": 32,
            "disks": [{"path": str(boot), "format": "raw", "uuid": _UUID, "cache": "writeback"}],
            "serial_console": False,
            "guest_agent": False,
            "security_model": "none",
            "chroot": False,
            **keys,
        }
        spec = completed(given)
        self.spec = with_slots(spec, layout_of(spec))
        moved = self.spec
        if not is_shared:
            moved = replace(
                moved, disks=(replace(moved.disks[0], path=str(there)), *moved.disks[1:])
            )
        self.source_key = KeyFolder(folder / "key-a", folder / "key-a") if encrypted else None
        self.target_key = KeyFolder(folder / "key-b", folder / "key-b") if encrypted else None
        for one in (self.source_key, self.target_key):
            if one:
                one.write(self.key)
        self.a, self.runtime = self._start(folder / "a", self.spec, qemus[0])
        self.moved_spec = moved
        self._folder, self._program = folder, qemus[1]
        self.restart_target()
        self.disk = next(
            str(row["hvinfo"]["id"]) for row in self.runtime.devices[DeviceKind.DISK][:1]
        )
        self.device = f"/machine/peripheral/{self.disk}/virtio-backend"
        self.mirrored = () if is_shared else (self.disk,)
        self.source = Outgoing(NAME, self.a.connect, self.source_key)
        self._connections: list[Any] = []

    def restart_target(self, *more: str) -> None:
        """Have another QEMU wait for the guest."""
        self._count = getattr(self, "_count", 0) + 1
        folder = self._folder / f"b{self._count}"
        self.b, _ = self._start(folder, self.moved_spec, self._program, self.runtime, more)
        self.target = Incoming(NAME, self.b.connect, self.target_key)

    def _start(
        self,
        folder: Path,
        spec: Spec,
        program: str,
        source: Runtime | None = None,
        more: Sequence[str] = (),
    ) -> tuple[PairQemu, Runtime]:
        for name in ("ctrl", "unit", "runtime"):
            (folder / name).mkdir(parents=True)
        paths.CONTROL_DIR = folder / "ctrl"
        paths.RUNTIME_DIR = folder / "runtime"
        with ExitStack() as stack:
            given = open_resources(spec, stack)
            if source:
                command, runtime = moved_command(source, spec, given), source
            else:
                command = qemu_args(spec, layout_of(spec), given)
                runtime = Runtime.load(write_runtime_file(spec, command=command))
            words = [*(_in_tree(program) if program else command[:1]), *command[1:], *more]
            qemu = PairQemu(folder, words, given)
        self._stack.callback(qemu.close)
        return qemu, runtime

    def close(self) -> None:
        self.forget_connections()
        self._stack.close()

    def forget_connections(self) -> None:
        """As the end of the process that drives the move does."""
        for one in self._connections:
            one.close()
        self._connections.clear()

    # Its steps.

    def steps(self) -> list[tuple[str, Callable[[], object]]]:
        """The whole way, in order."""
        source, target = self.source, self.target
        disks = [("serve_disks", self.serve), ("mirror", self.mirror)]
        disks += [("await_mirrors", self.await_mirrors)]
        return [
            ("prepare", self.prepare),
            *(disks if self.mirrored else []),
            ("receive", self.receive),
            ("send", self.send),
            ("await_standstill", self.await_standstill),
            ("leave_mirrors", partial(source.leave_mirrors, self.mirrored)),
            ("switch_over", source.switch_over),
            ("await_received", partial(target.await_received, timeout_s=WAIT_S)),
            ("claim", self.claim),
            ("go", target.go),
            ("quit", source.quit),
        ]

    def run(self, until: str = "") -> None:
        """Go the whole way, or to before a step."""
        for name, step in self.steps():
            if name == until:
                return
            step()

    def run_from(self, begin: str) -> None:
        """Go the rest of the way, from a step on."""
        names = [name for name, _ in self.steps()]
        for _, step in self.steps()[names.index(begin) :]:
            step()

    def prepare(self) -> None:
        bitmaps = self.source.prepare(self.options, [self.disk])
        self.target.prepare(bitmaps)

    def serve(self) -> None:
        self.reserved = channel.reserve(HERE)
        self.listener = channel.listen(HERE, callers=[self.reserved.getsockname()])
        self._connections += [self.reserved, self.listener]
        self.target.serve_disks(self.listener, self.mirrored)

    def mirror(self) -> None:
        channel.connect_bare(self.reserved, *self.listener.getsockname())
        self.source.mirror(self.disk, self.reserved)

    def await_mirrors(self) -> None:
        self.source.await_mirrors(self.mirrored, timeout_s=WAIT_S)

    def receive(self) -> None:
        listener = channel.listen(HERE)
        self._connections.append(listener)
        ours, theirs = self.connected(listener)
        self._connections += [ours, theirs]
        self.memory = ours
        self.target.receive(theirs)

    def connected(self, listener: Any) -> tuple[Any, Any]:
        """Both ends of a connection: the source's, and the target's."""
        found: list[Any] = []

        def accept() -> None:
            call = channel.accept_call(listener, key=self.key, purposes=[MEMORY], timeout_s=WAIT_S)
            found.append(call.connection)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            ours = channel.connect(*listener.getsockname(), key=self.key)
        finally:
            thread.join()
        return ours, found[0]

    def send(self) -> None:
        self.source.send(self.memory, self.target.facts(), self.mirrored)

    def await_standstill(self) -> None:
        self.source.await_standstill(self.options, timeout_s=WAIT_S)

    def claim(self) -> None:
        self.is_claimed = True

    # What becomes of it.

    def settle(self) -> None:
        """What nodes do with a move that was interrupted: one that is claimed goes forward, any
        other back."""
        self.forget_connections()
        if self.is_claimed:
            with contextlib.suppress(QemuGoneError):
                self.target.go()
            self.source.quit()
            return
        self.target.quit()
        self.b.end()
        with contextlib.suppress(QemuGoneError):
            try:
                self.source.cancel(self.mirrored)
            except MoveError:
                assert self.source.look().has_left()
                assert self.source.take_back(self.mirrored)

    def running(self) -> list[PairQemu]:
        """The QEMUs whose guests run."""
        return [one for one in (self.a, self.b) if one.state() == "running"]

    def write(self, qemu: PairQemu, value: int, *, at: int = MIB) -> None:
        """Write to the disk as a guest does; it is acknowledged."""
        said = qemu.io(self.device, f"write -P {value} {at} 64k")
        assert "wrote 65536/65536" in said, said

    def reads(self, qemu: PairQemu, value: int, *, at: int = MIB) -> bool:
        said = qemu.io(self.device, f"read -P {value} {at} 64k")
        assert "read 65536/65536" in said, said
        return "verification failed" not in said

    def never_two(self) -> None:
        """By the events of both, the guest never ran twice."""
        for begin, end in self.a.runs():
            for other, _ in self.b.runs():
                assert not begin <= other < end, (self.a.runs(), self.b.runs())


_UUID = "0a000000-0000-4000-8000-00000000000a"


def is_counting(qemu: PairQemu) -> bool:
    """Whether its guest goes on."""
    before = qemu.human("xp /1hx 0x20000")
    wait_for(
        "the guest to count", lambda: qemu.human("xp /1hx 0x20000") != before, timeout_s=WAIT_S
    )
    return True


def _descriptors(given: Resources) -> Iterator[int]:
    def of(files: DiskFiles) -> Iterator[int]:
        yield from files.descriptors
        for one in files.backing:
            yield from of(one)

    for files in given.disks.values():
        yield from of(files)


# The QEMU of another release, out of the tree of a node.


def qemu_of(release: str) -> str:
    """The program of a release's QEMU, for :class:`Pair`."""
    return str(node_image(release) / "usr/bin/qemu-system-x86_64")


def _in_tree(program: str) -> list[str]:
    root = Path(program).parents[2]
    libraries = root / "usr/lib/x86_64-linux-gnu"
    loader = libraries / "ld-linux-x86-64.so.2"
    folders = [libraries, libraries / "pulseaudio"]
    shared = [root / "usr/share" / name for name in ("qemu", "seabios")]
    firmware = [word for folder in shared for word in ("-L", str(folder))]
    return [str(loader), "--library-path", ":".join(map(str, folders)), program, *firmware]


def _environment(command: Sequence[str]) -> dict[str, str]:
    if "--library-path" not in command:
        return dict(os.environ)
    modules = Path(command[2].partition(":")[0]) / "qemu"
    return {**os.environ, "QEMU_MODULE_DIR": str(modules)}
