"""Who moves a guest between two nodes, for a benchmark: Brine, bare QMP, and `virsh migrate`; and
how long the guest stands still, by what it says itself."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from bench import libvirt
from bench.harness import timed
from brine.cluster.moves import Move, MoveStep, Wishes, following_step, is_final
from brine.common.operation import AnswerState, Operation, Step, StepAnswer, StepState, lead
from lab.errors import LabError
from lab.guest import result_in, run_order
from lab.node import Node
from lab.qmp import Qmp
from lab.waiting import wait_for

SETTLE_S = 0.5
"""The machine is left alone so long after a move."""
STEP_WAIT_S = 5.0
"""A node that was asked for a step waits so long for its end, as Salt's runner has it."""
STEP_S = 300.0

NAMES = ("n1", "n2")
ADDRESSES = {"n1": "10.29.1.1", "n2": "10.29.1.2"}
UNIT = "/srv/unit"
DISK_MIB = 64
MAX_DOWNTIME_MS = 50
"""Of all contenders. With QEMU's default of 300, what a guest of 128 MiB has left to send when QEMU
stops it is a matter of chance."""


@dataclass
class Sample:
    """One move, in seconds.

    :param down_s: from the last that the guest said on the source to its first on the target.
    :param parts: what parts of it took, and what the mover itself says.
    """

    total_s: float
    down_s: float
    parts: dict[str, float] = field(default_factory=dict)


# ---- a guest that says something all the time, on either node

_TICK_S = 0.002
_TICKER = f"mkfifo /f; exec 3<>/f; while :; do echo; read -t {_TICK_S} <&3; done"
_BEGIN = f"echo '{_TICKER}' >/ticker; sh /ticker >/dev/ttyS0 2>/dev/null & echo $! >/pid"
_END = "kill $(cat /pid) 2>/dev/null; rm -f /f"
_MANY = 100
_ANSWER_S = 120.0
_SILENCE_S = 60.0


class Line:
    """The serial line of a guest on one node. What it says is read at once: else it would wait."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.moments: list[float] = []
        self._heard = b""
        self._socket: socket.socket | None = None
        self._is_open = True
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while self._is_open:
            with socket.socket(socket.AF_UNIX) as line, contextlib.suppress(OSError):
                line.connect(str(self._path))
                self._socket = line
                while said := line.recv(65536):
                    self.moments.append(time.perf_counter())
                    self._heard += said
            self._socket = None
            time.sleep(_TICK_S)

    def close(self) -> None:
        """Read no more."""
        self._is_open = False
        if line := self._socket:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def begin(self) -> None:
        """Have the guest say something all the time."""
        before = len(self.moments)
        self._order(_BEGIN, lambda _mark: len(self.moments) > before + _MANY)

    def end(self) -> None:
        """Have the guest say nothing more."""
        self._order(_END, self._is_done)

    def _is_done(self, mark: str) -> bool:
        return result_in(self._heard.replace(b"\r\n", b"\n"), mark) is not None

    def _order(self, command: str, is_done: Callable[[str], bool]) -> None:
        """Have the guest run a shell command. What it has heard wrong is ordered again."""
        mark = f"order-{secrets.token_hex(4)}"
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            if line := self._socket:
                with contextlib.suppress(OSError):
                    line.sendall(f"\n{run_order(mark, command)}\n".encode())
            for _ in range(100):
                if is_done(mark):
                    return
                time.sleep(0.05)
        raise LabError(f"{self._path}: {command}: no answer, but {self._heard[-300:]!r}")


# ---- who moves a guest


class Contender(ABC):
    """A guest, and who moves it.

    :param name: of the guest.
    :param copies: it has a disk, of which each node has a copy of its own.
    """

    def __init__(self, name: str, nodes: Mapping[str, Node], *, copies: bool) -> None:
        self.name = name
        self.nodes = nodes
        self.copies = copies
        self.at, self.other = NAMES
        self.is_plain = True
        self.image = ""
        """Of the disk, where no mover makes it on the target."""

    def serial(self, node: str) -> Path:
        """Where the guest's serial line is on a node, or will be."""
        return self.nodes[node].path(f"{libvirt.SOCKETS}/{self.name}.serial")

    @abstractmethod
    def start(self) -> None:
        """Have the guest boot on the first node."""

    def await_boot(self) -> None:
        """Wait until the guest obeys orders."""
        with contextlib.closing(Line(self.serial(self.at))) as line:
            line.end()

    def prepare(self) -> None:
        """Do what is none of the mover's work."""
        if self.copies and self.image:
            _truncate(self.nodes[self.other].path(self.image))

    @abstractmethod
    def move(self) -> dict[str, float]:
        """Move the guest from *at* to *other*; returns what is known of the parts."""

    def after(self) -> dict[str, float]:
        """What the mover says of the move."""
        return {}

    def sample(self, *, is_plain: bool = True) -> Sample:
        """Move the guest, and see how long it stands still.

        :param is_plain: what is sent is not encrypted.
        """
        self.is_plain = is_plain
        with self._lines() as (source, target):
            source.begin()
            self.prepare()
            began_at = time.perf_counter()
            parts = self.move()
            total_s = time.perf_counter() - began_at
            wait_for("the guest to go on", lambda: target.moments, timeout_s=_SILENCE_S)
            down_s = target.moments[0] - source.moments[-1]
            target.end()
        self._swap()
        parts |= self.after()
        time.sleep(SETTLE_S)
        return Sample(total_s, down_s, parts)

    def hop(self) -> None:
        """Move the guest."""
        self.move()
        self._swap()

    def _swap(self) -> None:
        self.at, self.other = self.other, self.at

    @contextlib.contextmanager
    def _lines(self) -> Iterator[tuple[Line, Line]]:
        with contextlib.ExitStack() as stack:
            lines = [Line(self.serial(one)) for one in (self.at, self.other)]
            for line in lines:
                stack.callback(line.close)
            yield lines[0], lines[1]


class BrineMove(Contender):
    """By the steps that the master asks both nodes for."""

    def __init__(self, name: str, nodes: Mapping[str, Node], *, copies: bool) -> None:
        super().__init__(name, nodes, copies=copies)
        self._uuid = str(uuid.uuid4())
        self._serial = 1

    def serial(self, node: str) -> Path:
        return self.nodes[node].path(f"/run/brine/ctrl/{self.name}.serial")

    def start(self) -> None:
        node = self.nodes[self.at]
        disk = {"name": "data", "size_mib": DISK_MIB, "unit": UNIT}
        spec = {
            "name": self.name,
            "uuid": self._uuid,
            "node": self.at,
            "claim_serial": self._serial,
            "accel": "tcg",
            "memory_mib": libvirt.MEMORY_MIB,
            "kernel": f"{libvirt.GUEST}/kernel",
            "initrd": f"{libvirt.GUEST}/initramfs",
            "append": libvirt.APPEND,
            "cpu": "qemu64",
            "disks": [disk] if self.copies else [],
            "admin_state": "up",
        }
        node.run(["brine", "instance", "define", "-"], stdin=json.dumps(spec))
        if self.copies:
            told = node.run(["brine", "instance", "info", "--json", self.name]).stdout
            _fill(node.path(json.loads(told)["spec"]["disks"][0]["path"]))
        node.run(["brine", "instance", "start", self.name])

    def move(self) -> dict[str, float]:
        addresses = (ADDRESSES[self.at], ADDRESSES[self.other])
        wishes = Wishes(max_downtime_ms=MAX_DOWNTIME_MS, plaintext=self.is_plain)
        move = Move(
            *(self.name, self._uuid, self.at, self.other, *addresses, self._serial + 1),
            wishes=asdict(wishes),
        )
        identity = f"{time.time_ns():020}-{secrets.token_hex(4)}"
        record = Operation(identity, "move", f"move/{self.name}", facts=move.facts())
        parts: dict[str, float] = {}
        while asked := lead(record, following_step):
            began_at = time.perf_counter()
            answer = StepAnswer(asked.id, asked.name, AnswerState.DONE)
            if asked.name not in (MoveStep.FOLLOW, MoveStep.PUBLISH):  # the master's own
                answer = self._ask(asked)
                parts[asked.name] = time.perf_counter() - began_at
            asked.state, asked.answer = StepState.DONE, answer.facts()
            if answer.state is not AnswerState.DONE:
                raise LabError(f"{self.name}: {asked.name}: {answer.error}")
        self._serial += 1
        return parts

    def _ask(self, asked: Step) -> StepAnswer:
        question = json.dumps({"id": asked.id, "step": asked.name, "facts": asked.facts})
        waiting = ["brine", "move", "step", f"--wait={STEP_WAIT_S}", "--json"]
        command = self.nodes[asked.node].command(waiting)
        deadline = time.monotonic() + STEP_S
        while True:
            # With a limit, Python would look only now and then.
            done = subprocess.run(
                command, input=question, stdout=subprocess.PIPE, text=True, check=True
            )
            answer = StepAnswer.of(json.loads(done.stdout))
            if is_final(asked, answer):
                return answer
            if time.monotonic() > deadline:
                raise LabError(f"{self.name}: {asked.name} takes too long: {done.stdout}")

    def after(self) -> dict[str, float]:
        left = self.nodes[self.other]
        told = left.journal("BRINE_EVENT=moved-away", f"BRINE_INSTANCE={self.name}")
        return {"told": int(told[-1]["BRINE_DOWNTIME_MS"]) / 1e3}


class RawMove(Contender):
    """By QMP commands alone: two QEMUs, and this process is both nodes' mover."""

    _FOLDER = "/run/bench-raw"
    _PORT, _DISKS_PORT = 7001, 7002

    def __init__(self, name: str, nodes: Mapping[str, Node], *, copies: bool) -> None:
        super().__init__(name, nodes, copies=copies)
        self.image = f"{libvirt.IMAGES}/{name}.img"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        if self.copies:
            _fill(self.nodes[self.at].path(self.image))
        with self._qemu(self.at):
            pass

    @contextlib.contextmanager
    def _qemu(self, on: str, *arguments: str) -> Iterator[Qmp]:
        """Start QEMU on a node; yields its monitor when it answers."""
        socket_path = f"{libvirt.SOCKETS}/{self.name}.qmp"
        as_others = {"discard": "unmap", "cache": {"direct": True}}
        disk = {"driver": "file", "filename": self.image, **as_others}
        image = {"driver": "raw", "node-name": "disk0", "file": disk, **as_others}
        disks = ["-blockdev", json.dumps(image), "-device", "virtio-blk-pci,drive=disk0"]
        command = [
            *("qemu-system-x86_64", "-machine", "pc,accel=tcg", "-cpu", "qemu64"),
            *("-m", str(libvirt.MEMORY_MIB), "-nodefaults", "-no-user-config", "-display", "none"),
            *("-kernel", f"{libvirt.GUEST}/kernel", "-initrd", f"{libvirt.GUEST}/initramfs"),
            *("-append", libvirt.APPEND),
            *("-serial", f"unix:{libvirt.SOCKETS}/{self.name}.serial,server=on,wait=off"),
            *("-qmp", f"unix:{socket_path},server=on,wait=off"),
            *(disks if self.copies else []),
            *arguments,
        ]
        node = self.nodes[on]
        path = node.path(socket_path)
        path.unlink(missing_ok=True)
        self._processes[on] = subprocess.Popen(node.command(command), stdin=subprocess.DEVNULL)
        with wait_for("QEMU to answer", partial(_monitor, path), interval_s=0.005) as qmp:
            yield qmp

    def move(self) -> dict[str, float]:
        began_at = time.perf_counter()
        source_path = self.nodes[self.at].path(f"{libvirt.SOCKETS}/{self.name}.qmp")
        waits = ["-incoming", "defer", "-S"]
        with self._qemu(self.other, *waits) as target, Qmp(source_path, timeout_s=60) as source:
            started_s = time.perf_counter() - began_at
            self._prepare(source, target)
            uri = f"tcp:{ADDRESSES[self.other]}:{self._PORT}"
            target.command("migrate-incoming", uri=uri)
            if self.copies:
                self._mirror(source)
            sent_at = time.perf_counter()
            source.command("migrate", uri=uri)
            source.wait_event("MIGRATION", status="pre-switchover")
            if self.copies:
                source.command("block-job-cancel", device="mirror")
                source.wait_event("BLOCK_JOB_COMPLETED")
            source.command("migrate-continue", state="pre-switchover")
            source.wait_event("MIGRATION", status="completed")
            target.wait_event("MIGRATION", status="completed")
            while target.command("query-status")["status"] == "inmigrate":
                time.sleep(0.001)
            if self.copies:
                target.command("nbd-server-stop")
            target.command("cont")
            target.wait_event("RESUME")
            runs_at = time.perf_counter()
            with contextlib.suppress(LabError):
                source.command("quit")
        self._processes.pop(self.at).wait()
        return {"QEMU's start": started_s, "sent": runs_at - sent_at}

    def _prepare(self, source: Qmp, target: Qmp) -> None:
        tls: dict[str, str] = {}
        # An encrypted and a plain move of one guest take turns.
        for qmp in (source, target):
            with contextlib.suppress(LabError):
                qmp.command("object-del", id="tls")
        if not self.is_plain:
            key = f"qemu:{secrets.token_hex(32)}\n"
            for qmp, on, end in ((source, self.at, "client"), (target, self.other, "server")):
                self.nodes[on].write(f"{self._FOLDER}/keys.psk", key)
                psk = {"qom-type": "tls-creds-psk", "id": "tls", "dir": self._FOLDER}
                qmp.command("object-add", **psk, endpoint=end)
            tls = {"tls-creds": "tls"}
        wanted = {"events", "return-path"}
        _set_up(source, wanted | {"pause-before-switchover"}, tls)
        _set_up(target, wanted | {"late-block-activate"}, tls)
        if self.copies:
            address = {"host": ADDRESSES[self.other], "port": str(self._DISKS_PORT)}
            listens = {"type": "inet", "data": address}
            target.command("nbd-server-start", addr=listens, **tls)
            export = {"type": "nbd", "id": "disk0", "node-name": "disk0", "writable": True}
            target.command("block-export-add", **export)

    def _mirror(self, source: Qmp) -> None:
        with contextlib.suppress(LabError):
            source.command("blockdev-del", **{"node-name": "copy"})
        server = {"type": "inet", "host": ADDRESSES[self.other], "port": str(self._DISKS_PORT)}
        tls = {} if self.is_plain else {"tls-creds": "tls"}
        nbd = {"driver": "nbd", "node-name": "copy", "server": server, "export": "disk0"}
        source.command("blockdev-add", **nbd, **tls)
        mirror = {"job-id": "mirror", "device": "disk0", "target": "copy", "sync": "full"}
        source.command("blockdev-mirror", **mirror, **{"copy-mode": "write-blocking"})
        source.wait_event("BLOCK_JOB_READY")

    def close(self) -> None:
        """End what runs."""
        for path in (self.nodes[one].path(f"{libvirt.SOCKETS}/{self.name}.qmp") for one in NAMES):
            with contextlib.suppress(LabError, OSError), Qmp(path) as qmp:
                qmp.command("quit")


def _monitor(path: Path) -> Qmp | None:
    with contextlib.suppress(LabError):
        return Qmp(path, timeout_s=60)
    return None


def _set_up(qmp: Qmp, capabilities: set[str], tls: Mapping[str, str]) -> None:
    rows = [{"capability": one, "state": True} for one in sorted(capabilities)]
    qmp.command("migrate-set-capabilities", capabilities=rows)
    limits = {"downtime-limit": MAX_DOWNTIME_MS, "max-bandwidth": 1 << 62}
    qmp.command("migrate-set-parameters", **limits, **(tls or {"tls-creds": ""}))


class VirshMove(Contender):
    """By `virsh migrate --live` on the source's node, without encryption, as is its default."""

    def __init__(self, name: str, nodes: Mapping[str, Node], *, copies: bool) -> None:
        super().__init__(name, nodes, copies=copies)
        self.image = f"{libvirt.IMAGES}/{name}.img"

    def start(self) -> None:
        node = self.nodes[self.at]
        path = f"{libvirt.SOCKETS}/{self.name}.serial"
        devices = f"<serial type='unix'><source mode='bind' path='{path}'/></serial>"
        if self.copies:
            _fill(node.path(self.image))
            devices += libvirt.disk_xml(self.image)
        file = f"{libvirt.IMAGES}/{self.name}.xml"
        node.write(file, libvirt.domain_xml(self.name, devices, qmp=None))
        node.run(["virsh", "--quiet", "create", file])

    def prepare(self) -> None:
        super().prepare()
        limit = ["migrate-setmaxdowntime", self.name, str(MAX_DOWNTIME_MS)]
        self.nodes[self.at].run(["virsh", "--quiet", *limit])

    def move(self) -> dict[str, float]:
        address = ADDRESSES[self.other]
        copying = ["--copy-storage-all"] if self.copies else []
        where = [self.name, f"qemu+tcp://{address}/system", f"tcp://{address}"]
        command = ["virsh", "--quiet", "migrate", "--live", *copying, *where]
        return {"command": timed(self.nodes[self.at].command(command))}


def _fill(path: Path) -> None:
    path.write_bytes(os.urandom(DISK_MIB * 2**20))


def _truncate(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.touch()
    os.truncate(path, DISK_MIB * 2**20)
