"""Starting and listing instances, beside libvirt's commands and beside what can't be less."""

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from bench import libvirt, machine
from bench.harness import (
    ENVIRONMENT,
    PYTHON,
    UNITS,
    Plan,
    Report,
    Table,
    TableRow,
    in_turns,
    tell,
    timed,
    timing,
)
from brine.common import paths
from brine.instance.registry import define_instance
from brine.vm.spec import NOT_CONFINED
from lab.errors import LabError

START_LIMIT = 1.0
"""A start to its end, beside libvirt's."""
LIST_LIMIT = 1.6
"""A list, beside libvirt's."""
SETTLE_S = 0.3
"""The machine is left alone so long after something was stopped."""
LISTED, RUNNING = 500, 20
"""Instances for the lists, and how many of them run; a trial has a tenth of both."""


class GuestSetup(StrEnum):
    """A spec to start."""

    PLAIN = "no disk, no NIC"
    USUAL = "a disk and a NIC"
    CONFINED = "the same, with a user and a root of its own"

    @property
    def domain(self) -> str:
        """The name of the instance, and of libvirt's domain."""
        return self.name.lower()

    @property
    def qmp(self) -> Path:
        """A QMP socket for the benchmark alone, as a socket serves one client."""
        return libvirt.SOCKETS / f"{self.domain}.qmp"


@dataclass(frozen=True)
class Start:
    """One start, in seconds since before the command was started."""

    exec_s: float  # until a process began to execute QEMU, or what a unit has in its stead
    answers_s: float  # until QEMU answered on a QMP socket; 0 where there is no QEMU
    returned_s: float  # until the command had ended; 0 where there is none

    def overhead_s(self) -> float:
        """The command without what QEMU itself took until it answered."""
        return self.returned_s - (self.answers_s - self.exec_s)


# ---- the kernel's word that a program is about to be executed: fanotify(7)

_FAN_CLOEXEC, _FAN_NONBLOCK = 0x1, 0x2
_FAN_MARK_ADD = 0x1
_FAN_OPEN_EXEC = 0x1000
_AT_FDCWD = -100
_EVENT = struct.Struct("=IBBHQii")  # event_len, vers, reserved, metadata_len, mask, fd, pid
_READ_SIZE = 4096


@contextlib.contextmanager
def watched(program: Path) -> Iterator[int]:
    """A descriptor that is readable when a program has been executed.

    Unlike a process's start time in /proc it is of the exec, not of the fork, and finer than a
    hundredth of a second; unlike a wrapper it takes no time of the program's.

    :raises LabError: if the kernel does not let us.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.fanotify_init(_FAN_CLOEXEC | _FAN_NONBLOCK, os.O_RDONLY | os.O_CLOEXEC)
    mask = ctypes.c_uint64(_FAN_OPEN_EXEC)
    path = os.fsencode(program)
    if libc.fanotify_mark(descriptor, _FAN_MARK_ADD, mask, _AT_FDCWD, path) < 0:
        text = f"{program} can't be watched: {os.strerror(ctypes.get_errno())}"
        raise LabError(text, hint="be root, on a kernel with fanotify(7)")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _was_executed(watch: int) -> bool:
    """Whether the program was executed since this was asked last."""
    found = False
    with contextlib.suppress(BlockingIOError):
        while data := os.read(watch, _READ_SIZE):
            for length, *_, file, _ in _EVENT.iter_unpack(data):
                assert length == _EVENT.size
                if file >= 0:
                    os.close(file)
                found = True
    return found


# ---- one start, watched from outside

LIMIT_S = 60.0
_PAUSE_S = 0.001


class _Client:
    """A QMP client that takes whatever is needed to learn whether QEMU answers, and never waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection: socket.socket | None = None
        self._heard = b""

    def connect(self) -> socket.socket | None:
        """Connect, if QEMU listens by now."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(str(self.path))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        self.connection = connection
        return connection

    def answered(self) -> bool:
        """Read what there is; whether QEMU has answered a command."""
        assert self.connection
        try:
            data = self.connection.recv(64 * 1024)
        except ConnectionResetError:
            data = b""
        if not data:
            raise LabError(f"{self.path}: QEMU has ended", hint="its last words are above")
        is_greeting = b"\n" not in self._heard and b"\n" in self._heard + data
        self._heard += data
        if is_greeting:
            self.connection.sendall(b'{"execute": "qmp_capabilities"}\n')
        return b'"return"' in self._heard


def timed_start(
    command: Sequence[str],
    program: int,
    qmp: Path | None,
    *,
    returns: bool = True,
    handed_over: Sequence[int] = (),
) -> tuple[Start, subprocess.Popen[bytes]]:
    """Run a command that starts something, and watch; returns the command's process, too.

    :param program: tells when what it is to execute in the end is; the last time counts before QEMU
        answers, as the one before may only have asked for QEMU's version.
    :param qmp: a socket of QEMU's that is for us alone; None if there is no QEMU.
    :param returns: whether it comes back; else it is the program itself, and stays.
    :param handed_over: descriptors that it has of ours.
    :raises LabError: if it fails, or takes too long.
    """
    _was_executed(program)
    if qmp:
        qmp.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        output: Any = stack.enter_context(tempfile.TemporaryFile())
        began_at = time.perf_counter()
        process = subprocess.Popen(
            command,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=handed_over,
        )
        ended = os.pidfd_open(process.pid)  # readable when the process has ended
        stack.callback(os.close, ended)
        client = _Client(qmp) if qmp else None
        exec_s = answers_s = returned_s = None
        while exec_s is None or (client and answers_s is None) or (returns and returned_s is None):
            wanted: list[Any] = [program]
            if returned_s is None:
                wanted.append(ended)
            if client and client.connection and answers_s is None:
                wanted.append(client.connection)
            # A socket that is not there yet can't be waited for.
            is_polling = client and not client.connection and exec_s is not None
            news, _, _ = select.select(wanted, [], [], _PAUSE_S if is_polling else LIMIT_S)
            now_s = time.perf_counter() - began_at
            if program in news and _was_executed(program) and answers_s is None:
                exec_s = now_s
            if ended in news:
                returned_s = now_s
            try:
                if client and client.connection in news and client.answered():
                    answers_s = now_s
            except LabError:
                output.seek(0)
                tell(output.read().decode(errors="replace").strip())
                raise
            if client and is_polling and (connection := client.connect()):
                stack.enter_context(connection)
            if now_s > LIMIT_S or (returned_s and (process.wait() != 0 or not returns)):
                output.seek(0)
                said = output.read().decode(errors="replace").strip()
                text = f"{' '.join(command[:4])} failed, or took too long: {said}"
                raise LabError(text, hint="is it busy? try again")
        return Start(exec_s, answers_s or 0, returned_s or 0), process


# ---- the same guests, as specs of Brine's and as libvirt's domains


def spec_of(guest: GuestSetup) -> dict[str, Any]:
    """As ``brine instance define`` takes it."""
    devices: dict[str, Any] = {}
    if guest is not GuestSetup.PLAIN:
        devices = _spec_devices(guest.domain)
    if guest is GuestSetup.CONFINED:
        devices |= {"security_model": "user", "security_user": libvirt.USER, "chroot": True}
    qmp = ["-qmp", f"unix:{guest.qmp},server=on,wait=off"]
    return {**_spec(guest.domain), **devices, "extra_arguments": qmp}


def xml_of(guest: GuestSetup) -> str:
    """As ``virsh define`` takes it. libvirt's QEMU always has a user of its own."""
    devices = "" if guest is GuestSetup.PLAIN else _devices(guest.domain, 2, 1)
    return _xml(guest.domain, devices, guest.qmp)


def populate(listed: int, running: int) -> None:
    """Define instances and domains with a disk and a NIC each, and start some of them, with their
    processors stopped."""
    orders = []
    for number in range(listed):
        name = f"listed{number:04}"
        state = {"extra_arguments": ["-S"], "admin_state": "up" if number < running else "down"}
        define_instance({**_spec(name), **_spec_devices(name), **state})
        file = libvirt.IMAGES / f"{name}.xml"
        xml = _xml(name, _devices(name, 3 + number // 256, number % 256))
        file.write_text(xml, encoding="utf-8")
        orders.append(f"define {file}")
    orders += [f"start --paused listed{number:04}" for number in range(running)]
    timed(["virsh", "--quiet", "; ".join(orders)])
    timed(["brine", "instance", "start", "--all"])


def _spec(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "accel": "tcg",
        "memory_mib": libvirt.MEMORY_MIB,
        "kernel": f"{libvirt.GUEST}/kernel",
        "initrd": f"{libvirt.GUEST}/initramfs",
        "append": libvirt.APPEND,
        "shutdown_timeout": 1,
        **NOT_CONFINED,
    }


def _spec_devices(name: str) -> dict[str, Any]:
    disk = {"path": str(libvirt.make_image(f"{name}-brine"))}
    return {"disks": [disk], "nics": [{"link": libvirt.BRIDGE}]}


def _devices(name: str, *mac: int) -> str:
    address = ":".join(["52:54:00:00", *(f"{part:02x}" for part in mac)])
    return libvirt.disk_xml(libvirt.make_image(f"{name}-libvirt")) + libvirt.nic_xml(address)


def _xml(name: str, devices: str, qmp: Path | None = None) -> str:
    path = libvirt.SOCKETS / f"{name}.serial"
    serial = f"<serial type='unix'><source mode='bind' path='{path}'/></serial>"
    agent = "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>"
    cpu = "<cpu mode='maximum'/>"
    return libvirt.domain_xml(name, serial + agent + devices, qmp=qmp, processor=cpu)


# ---- who starts them, and what can't be less

QEMU = "QEMU alone"
UNIT = "systemctl start, of a unit that sleeps"
PYTHONS = "the same, with three bare Pythons"

_QEMU = Path("/usr/bin/qemu-system-x86_64")
_FD = re.compile(r"^fd=\d+,")
# A copy of sleep(1) for the benchmark alone: no other program executes it.
_SLEEP = Path("/srv/sleep")

_UNIT = f"""[Service]
Type=exec
ExecStart={_SLEEP} infinity
"""
# As many as ours has: one becomes the program, one waits for it; the third is the command.
_UNIT_OF_PYTHONS = f"""[Service]
Type=exec
ExecStart={PYTHON} -I -c 'import os; os.execv("{_SLEEP}", ["sleep", "infinity"])'
ExecStartPost={PYTHON} -I -c pass
"""
_PYTHONS_SYSTEMCTL = "import subprocess; subprocess.run(['systemctl', 'start', '{unit}'], check=1)"

Starter = Callable[[], Start]
"""Starts something with the clock running, and stops it, whatever that takes."""


def brine(guest: GuestSetup) -> str:
    """The name of starts by Brine."""
    return f"{guest}: brine instance start"


def virsh(guest: GuestSetup) -> str:
    """The name of starts by libvirt."""
    return f"{guest}: virsh start"


def _command(
    starting: Sequence[str], stopping: Sequence[str], program: int, qmp: Path | None = None
) -> Start:
    found, _ = timed_start(starting, program, qmp)
    timed(stopping)
    time.sleep(SETTLE_S)
    return found


def _alone(guest: GuestSetup, program: int) -> Start:
    """Start QEMU without Brine, with the arguments that Brine gave it at its last start."""
    runtime = json.loads((paths.RUNTIME_DIR / f"{guest.domain}.json").read_bytes())
    # In place of the console's log, which was handed over.
    log = os.open(os.devnull, os.O_WRONLY)
    try:
        command = [_FD.sub(f"fd={log},", argument) for argument in runtime["command"]]
        for key in ("kernel", "initrd"):  # they were handed over, too
            command[command.index(f"-{key}") + 1] = runtime["spec"][key]
        found, process = timed_start(command, program, guest.qmp, returns=False, handed_over=[log])
    finally:
        os.close(log)
    process.kill()
    process.wait()
    time.sleep(SETTLE_S)
    return found


def of_guests(stack: contextlib.ExitStack) -> dict[str, Starter]:
    """All who start a guest."""
    qemu = stack.enter_context(watched(_QEMU))
    found: dict[str, Starter] = {}
    for guest in GuestSetup:
        name = guest.domain
        define_instance(spec_of(guest))
        starting = ["brine", "instance", "start", name]
        stopping = ["brine", "instance", "stop", "--force", name]
        found[brine(guest)] = partial(_command, starting, stopping, qemu, guest.qmp)
        if guest is GuestSetup.CONFINED:
            continue  # libvirt's always is
        file = libvirt.IMAGES / f"{name}.xml"
        file.write_text(xml_of(guest), encoding="utf-8")
        timed(["virsh", "define", str(file)])
        starting, stopping = ["virsh", "start", name], ["virsh", "destroy", name]
        found[virsh(guest)] = partial(_command, starting, stopping, qemu, guest.qmp)
    return {**found, QEMU: partial(_alone, GuestSetup.PLAIN, qemu)}


def of_floors(stack: contextlib.ExitStack) -> dict[str, Starter]:
    """Units that do nothing."""
    shutil.copy("/usr/bin/sleep", _SLEEP)
    sleep = stack.enter_context(watched(_SLEEP))
    one, pythons = "bench-sleep.service", "bench-pythons.service"
    for unit, text in ((one, _UNIT), (pythons, _UNIT_OF_PYTHONS)):
        (UNITS / unit).write_text(text, encoding="utf-8")
    timed(["systemctl", "daemon-reload"])
    script = [PYTHON, "-I", "-c", _PYTHONS_SYSTEMCTL.format(unit=pythons)]
    return {
        UNIT: partial(_command, ["systemctl", "start", one], ["systemctl", "stop", one], sleep),
        PYTHONS: partial(_command, script, ["systemctl", "stop", pythons], sleep),
    }


# ---- lists

BRINE_LISTS = ("brine instance list", "brine instance list --json")
VIRSH_LIST = "virsh list --all"
USUAL_IMPORTS = "import argparse, json"
_READ = "import json, pathlib; [json.loads(f.read_bytes()) for f in pathlib.Path({!r}).iterdir()]"
BESIDE: Mapping[str, Sequence[str]] = {
    "python3 -c pass": [PYTHON, "-c", "pass"],
    f"python3 -c '{USUAL_IMPORTS}'": [PYTHON, "-c", USUAL_IMPORTS],
    "import json; read and parse all specs": [PYTHON, "-c", _READ.format(str(paths.SPECS_DIR))],
    "systemctl show, of all instances' units": [
        *("systemctl", "show", "--", "brine-instance@*.service")
    ],
    VIRSH_LIST: VIRSH_LIST.split(),
}
"""The other tools that list, and the floors."""


# ---- the rounds and the tables


def measure(plan: Plan) -> Report:
    """First all starts, then all lists."""
    libvirt.prepare()
    with contextlib.ExitStack() as stack:
        starting = {**of_guests(stack), **of_floors(stack)}
        # libvirt asks QEMU once what it can do, and kvmd is started by the first instance.
        starts = in_turns("starts", plan.rounds, starting, warm_up=True)
    part = plan.pick(1, 1, 10)
    listed, running = LISTED // part, RUNNING // part
    tell(f"defining {listed} instances, and starting {running}")
    populate(listed, running)
    # What lists, and those whom it asks. Of starts that can't be had: of a unit, or a domain, each
    # process is in a group of its own.
    machine.lead_own_group()
    machine.favour("libvirtd", "systemd")
    lines = {**BESIDE, **{name: name.split() for name in BRINE_LISTS}}
    lists = in_turns("lists", plan.rounds, timing(lines), warm_up=True)
    tables = [
        Table("what a start can't be less than", list(_floors(starts))),
        *(Table(f"starting a guest, {it}", list(_starts(starts, it))) for it in GuestSetup),
        Table(f"listing {listed} instances, of which {running} run", list(_lists(lists))),
    ]
    heads = [*machine.description(*libvirt.VERSIONS_OF), f"emulated guests; rounds: {plan.rounds}"]
    return Report(heads, tables, {**starts, **lists})


_EXEC, _ANSWER, _END = map(attrgetter, ("exec_s", "answers_s", "returned_s"))


def _floors(starts: Mapping[str, Sequence[Start]]) -> Iterator[TableRow]:
    yield _row("QEMU alone, to its answer on QMP", _ANSWER, starts[QEMU])
    for name in (UNIT, PYTHONS):
        yield _row(f"{name}: to the exec", _EXEC, starts[name])
        yield _row("  the command's end", _END, starts[name])


def _starts(starts: Mapping[str, Sequence[Start]], guest: GuestSetup) -> Iterator[TableRow]:
    # libvirt's guest has a user of its own, whether ours has one or not.
    peer = GuestSetup.USUAL if guest is GuestSetup.CONFINED else guest
    theirs, ours = starts[virsh(peer)], starts[brine(guest)]
    exec_ = _row("virsh start: to QEMU's exec", _EXEC, theirs)
    answers = _row("virsh start: to QEMU's answer on QMP", _ANSWER, theirs)
    returned = _row("virsh start: the command's end", _END, theirs)
    less = _row("virsh start, less QEMU's own", Start.overhead_s, theirs)
    own = _row("brine instance start: to QEMU's exec", _EXEC, ours)
    yield from (exec_, answers, returned)
    yield own.beside(returned, "virsh start")
    yield replace(own, title="  the same").beside(exec_, "its way to the exec")
    yield _row("  to QEMU's answer on QMP", _ANSWER, ours).beside(answers, "its way there")
    yield (
        _row("  the command's end", _END, ours).beside(returned, "virsh start").at_most(START_LIMIT)
    )
    yield less
    own = _row("brine instance start, less QEMU's own", Start.overhead_s, ours)
    yield own.beside(less, "virsh's")


def _lists(lists: Mapping[str, Sequence[float]]) -> Iterator[TableRow]:
    rows = {name: TableRow.of_times(name, lists[name]) for name in BESIDE}
    yield from rows.values()
    for name in BRINE_LISTS:
        row = TableRow.of_times(name, lists[name]).beside(rows[VIRSH_LIST], "virsh list")
        yield row.at_most(LIST_LIMIT)


def _row(title: str, value: Callable[[Start], float], starts: Sequence[Start]) -> TableRow:
    return TableRow.of_times(title, [value(start) for start in starts])
