"""`bench instance`'s measuring process, in the node."""

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import machine
from bench.harness import ENVIRONMENT, PYTHON, in_turns, tell, timed, timing
from bench.instance import (
    BRINE_LIST,
    BRINE_LIST_JSON,
    LIBVIRTS_USER,
    PASS,
    PYTHONS,
    QMP_FOLDER,
    READ_SPECS,
    SYSTEMCTL_SHOW,
    UNIT,
    USUAL_IMPORTS,
    VIRSH_LIST,
    Guest,
    Plan,
    Results,
    Start,
    Way,
    series,
)
from bench.libvirt_node import (
    APPEND,
    BRIDGE,
    GUEST,
    IMAGES,
    MEMORY_MIB,
    disk_xml,
    domain_xml,
    nic_xml,
)
from brine.common import paths
from brine.instance.operations import define_instance
from brine.instance.spec import NOT_CONFINED
from brine.instance.store import FOLDER
from lab.errors import LabError

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


@dataclass
class _Greeted:
    """A QMP client that takes whatever is needed to learn whether QEMU answers, and never waits."""

    path: Path
    connection: socket.socket | None = None
    _heard: bytes = b""

    def connect(self) -> None:
        """Connect, if QEMU listens by now."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(str(self.path))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return
        self.connection = connection

    def answered(self) -> bool:
        """Read what there is; whether QEMU has answered a command."""
        assert self.connection
        data = self.connection.recv(64 * 1024)
        if not data:
            raise LabError(f"{self.path}: QEMU has ended", hint="see its log in the node")
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
        client = _Greeted(qmp) if qmp else None
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
            if client and client.connection in news and client.answered():
                answers_s = now_s
            if client and is_polling:
                client.connect()
                if client.connection:
                    stack.enter_context(client.connection)
            if now_s > LIMIT_S or (returned_s and (process.wait() != 0 or not returns)):
                output.seek(0)
                said = output.read().decode(errors="replace").strip()
                text = f"{' '.join(command[:4])} failed, or took too long: {said}"
                raise LabError(text, hint="is it busy? try again")
        return Start(exec_s, answers_s or 0, returned_s or 0), process


# ---- the same guests, as specs of Brine's and as libvirt's domains

_IMAGE_BYTES = 64 * 2**20
_BRINES_MAC = "52:54:00:00:01:{number:02x}"
_LIBVIRTS_MAC = "52:54:00:00:02:{number:02x}"


def qmp_of(guest: Guest) -> Path:
    """A QMP socket that nobody else has a use for: each serves one client."""
    return QMP_FOLDER / f"{guest.name.lower()}.qmp"


def spec_of(guest: Guest) -> dict[str, Any]:
    """As ``brine instance define`` takes it."""
    name = guest.name.lower()
    data = _spec(name)
    data["extra_arguments"] = ["-qmp", f"unix:{qmp_of(guest)},server=on,wait=off"]
    if guest is not Guest.PLAIN:
        mac = _BRINES_MAC.format(number=1 if guest is Guest.USUAL else 2)
        data["disks"] = [{"path": _image(f"{name}-brine")}]
        data["nics"] = [{"link": BRIDGE, "mac": mac}]
    if guest is Guest.CONFINED:
        data |= {"security_model": "user", "security_user": LIBVIRTS_USER, "chroot": True}
    return data


def xml_of(guest: Guest) -> str:
    """As ``virsh define`` takes it. libvirt's QEMU always has a user of its own."""
    devices = ""
    if guest is not Guest.PLAIN:
        devices = _devices(guest.name.lower(), _LIBVIRTS_MAC.format(number=1))
    return _xml(guest.name.lower(), devices, qmp_of(guest))


def listed_name(number: int) -> str:
    """One of those that are only there to be listed."""
    return f"listed{number:04}"


def listed_spec(plan: Plan, number: int) -> dict[str, Any]:
    """Its spec: with a disk and a NIC. Its processor does not run, and needs none of ours."""
    name = listed_name(number)
    return {
        **_spec(name),
        "extra_arguments": ["-S"],
        "admin_state": "up" if number < plan.running else "down",
        "disks": [{"path": _image(f"{name}-brine")}],
        "nics": [{"link": BRIDGE}],
    }


def listed_xml(number: int) -> str:
    """The same for libvirt, which is told at its start that its processor is not to run."""
    name = listed_name(number)
    mac = f"52:54:00:00:{3 + number // 256:02x}:{number % 256:02x}"
    return _xml(name, _devices(name, mac))


def _spec(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "accel": "tcg",
        "memory_mib": MEMORY_MIB,
        "kernel": f"{GUEST}/kernel",
        "initrd": f"{GUEST}/initramfs",
        "append": APPEND,
        "shutdown_timeout": 1,
        **NOT_CONFINED,
    }


def _devices(name: str, mac: str) -> str:
    return disk_xml(_image(f"{name}-libvirt")) + nic_xml(mac, BRIDGE)


def _xml(name: str, devices: str, qmp: Path | str = "") -> str:
    serial = f"<serial type='unix'><source mode='bind' path='{QMP_FOLDER}/{name}.serial'/></serial>"
    agent = "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>"
    cpu = "<cpu mode='maximum'/>"
    return domain_xml(name, serial + agent + devices, guest=GUEST, qmp=qmp, processor=cpu)


def _image(name: str) -> str:
    image = Path(IMAGES, f"{name}.img")
    with image.open("ab") as file:
        file.truncate(_IMAGE_BYTES)
    return str(image)


# ---- who starts them, and what can't be less

_QEMU = Path("/usr/bin/qemu-system-x86_64")
_FD = re.compile(r"^fd=\d+,")
_UNITS = Path("/run/systemd/system")
# A copy, which nobody else executes.
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


@dataclass(frozen=True)
class Contender:
    """What starts something with the clock running, and what stops it, whatever that takes."""

    start: Callable[[], Start]
    stop: Callable[[], object]


def _command(
    starting: Sequence[str], stopping: Sequence[str], program: int, qmp: Path | None = None
) -> Contender:
    return Contender(
        start=lambda: timed_start(starting, program, qmp)[0], stop=partial(timed, stopping)
    )


def _alone(guest: Guest, program: int) -> Contender:
    """QEMU with the arguments that it had when Brine started it last, and nobody else."""
    running: list[subprocess.Popen[bytes]] = []

    def start() -> Start:
        runtime = json.loads((paths.RUNTIME_DIR / f"{guest.name.lower()}.json").read_bytes())
        # In place of the console's log, which was handed over.
        log = os.open(os.devnull, os.O_WRONLY)
        try:
            command = [_FD.sub(f"fd={log},", argument) for argument in runtime["command"]]
            start, process = timed_start(
                command, program, qmp_of(guest), returns=False, handed_over=[log]
            )
        finally:
            os.close(log)
        running.append(process)
        return start

    def stop() -> None:
        while running:
            process = running.pop()
            process.kill()
            process.wait()

    return Contender(start, stop)


def of_guests(stack: contextlib.ExitStack) -> dict[str, Contender]:
    """All who start a guest."""
    qemu = stack.enter_context(watched(_QEMU))
    found: dict[str, Contender] = {}
    for guest in Guest:
        name, qmp = guest.name.lower(), qmp_of(guest)
        define_instance(spec_of(guest))
        starting = ["brine", "instance", "start", name]
        stopping = ["brine", "instance", "stop", "--force", name]
        found[series(guest, Way.BRINE)] = _command(starting, stopping, qemu, qmp)
        if guest is Guest.CONFINED:
            continue  # libvirt's always is
        file = Path(IMAGES, f"{name}.xml")
        file.write_text(xml_of(guest), encoding="utf-8")
        timed(["virsh", "define", str(file)])
        starting, stopping = ["virsh", "start", name], ["virsh", "destroy", name]
        found[series(guest, Way.VIRSH)] = _command(starting, stopping, qemu, qmp)
    return {**found, series(Guest.PLAIN, Way.QEMU): _alone(Guest.PLAIN, qemu)}


def of_floors(stack: contextlib.ExitStack) -> dict[str, Contender]:
    """Units that do nothing."""
    shutil.copy("/usr/bin/sleep", _SLEEP)
    sleep = stack.enter_context(watched(_SLEEP))
    one, pythons = "bench-sleep.service", "bench-pythons.service"
    for unit, text in ((one, _UNIT), (pythons, _UNIT_OF_PYTHONS)):
        (_UNITS / unit).write_text(text, encoding="utf-8")
    timed(["systemctl", "daemon-reload"])
    script = _PYTHONS_SYSTEMCTL.format(unit=pythons)
    return {
        UNIT: _command(["systemctl", "start", one], ["systemctl", "stop", one], sleep),
        PYTHONS: _command([PYTHON, "-I", "-c", script], ["systemctl", "stop", pythons], sleep),
    }


# ---- lists

_READ = "import json, pathlib; [json.loads(f.read_bytes()) for f in pathlib.Path({!r}).iterdir()]"


def of_lists() -> dict[str, Callable[[], float]]:
    """All that list, and what can't be less."""
    lines: dict[str, Sequence[str]] = {
        PASS: [PYTHON, "-c", "pass"],
        USUAL_IMPORTS: [PYTHON, "-c", USUAL_IMPORTS],
        READ_SPECS: [PYTHON, "-c", _READ.format(str(FOLDER))],
        SYSTEMCTL_SHOW: ["systemctl", "show", "--", "brine-instance@*.service"],
        BRINE_LIST: BRINE_LIST.split(),
        BRINE_LIST_JSON: BRINE_LIST_JSON.split(),
        VIRSH_LIST: VIRSH_LIST.split(),
    }
    return timing(lines)


def populate(plan: Plan) -> None:
    """Define instances and domains, and start some of them."""
    orders = []
    for number in range(plan.instances):
        define_instance(listed_spec(plan, number))
        file = Path(IMAGES, f"{listed_name(number)}.xml")
        file.write_text(listed_xml(number), encoding="utf-8")
        orders.append(f"define {file}")
    orders += [f"start --paused {listed_name(number)}" for number in range(plan.running)]
    timed(["virsh", "--quiet", "; ".join(orders)])
    timed(["brine", "instance", "start", "--all"])


def favour() -> None:
    """Have what lists, and those whom it asks, well ahead of the machine's other work.

    Of starts that can't be had: of a unit, or a domain, each process is in a group of its own; see
    machine.lead_own_group().
    """
    machine.lead_own_group()
    found = subprocess.run(["pidof", "libvirtd", "systemd"], stdout=subprocess.PIPE, check=True)
    machine.favour(map(int, found.stdout.split()))


# ---- the rounds


def measure(plan: Plan) -> Results:
    """Run all rounds: first all starts, then all lists."""
    with contextlib.ExitStack() as stack:
        starting = {**of_guests(stack), **of_floors(stack)}
        starts = {name: partial(_start, one, plan.settle_s) for name, one in starting.items()}
        # libvirt asks QEMU once what it can do, and kvmd is started by the first instance.
        started = in_turns("starts", plan.rounds, starts, warm_up=True)
    tell(f"defining {plan.instances} instances, and starting {plan.running}")
    populate(plan)
    favour()
    return Results(started, in_turns("lists", plan.rounds, of_lists(), warm_up=True))


def _start(contender: Contender, settle_s: float) -> Start:
    found = contender.start()
    contender.stop()
    time.sleep(settle_s)
    return found
