"""Real QEMU guests that do what they are told, on the host or in a node."""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pwd
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.command import ending_with_us
from lab.errors import LabError
from lab.guest_image import KERNEL_OPTIONS, guest_image
from lab.machine import Host, Machine, require_commands
from lab.qmp import Qmp
from lab.waiting import wait_for

MEMORY_MIB = 128
START_TIMEOUT_S = 20.0
READY = "guest: ready"
GROUP = "brine"
_SHOWN_LINES = 20
_ASKED_AGAIN_S = 5.0

# Where guests of a node keep their kernel and their serial lines.
_NODE_FOLDER = "/run/brine-lab"


# What QEMU needs beside its program, where the host's files are not all at hand: firmware, and the
# software emulation, which Debian has in a file of its own.
QEMU_FILES = [
    Path("/usr/share/qemu"),
    Path("/usr/share/seabios"),
    *Path("/usr/lib").glob("*/qemu/accel-tcg-x86_64.so"),
]


class Guest:
    """A running guest.

    `pid` is its QEMU as this process's PID namespace numbers it. `qmp_socket` and `kvmd_socket` are
    its QMP sockets, as this process finds them.
    """

    def __init__(self, name: str, control_dir: Path, serial: socket.socket, qemu: _Qemu) -> None:
        self.name = name
        self.qmp_socket = control_dir / f"{name}.qmp"
        self.kvmd_socket = control_dir / f"{name}.kvmd"
        self._serial = serial
        self._qemu = qemu
        self._log = qemu.folder / f"{name}.log"
        self._ordered_at = 0
        self._commands = 0
        # The kernel translates the peer's PID into this process's namespace. A descriptor of the
        # process, unlike its number, never means another one.
        credentials = serial.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid: int = struct.unpack("3i", credentials)[0]
        self._process = os.pidfd_open(self.pid)
        self._reader = threading.Thread(target=self._drain, name=f"serial {name}", daemon=True)
        self._reader.start()

    def wait_ready(self, timeout_s: float = 60) -> None:
        """Wait until the guest obeys orders; after the order `reboot` or `hello`, again.

        Raises LabError when it ends or takes too long, and again too long after a reset.
        """

        def ready() -> bool:
            self.check_running()
            return READY in self.output()[self._ordered_at :]

        what = f"guest {self.name} to be ready"
        with contextlib.suppress(LabError):
            wait_for(what, ready, timeout_s=timeout_s)
            return
        self.check_running()
        # Its line may have spoilt what it said.
        self.tell("hello")
        with contextlib.suppress(LabError):
            wait_for(what, ready, timeout_s=_ASKED_AGAIN_S)
            return
        self.check_running()
        # An emulated one has been seen to stand still while it boots, once in a thousand times.
        self.qmp("system_reset")
        try:
            wait_for(what, ready, timeout_s=timeout_s)
        except LabError as error:
            raise LabError(f"{error}, not even after a reset\n{self._tail()}") from None

    def order(self, text: str, *, timeout_s: float = 60) -> None:
        """Have the guest, which must be ready, `poweroff`, `reboot` or `crash`.

        Raises LabError when it does not begin to within `timeout_s`.
        """
        begun_at = len(self.output())
        told_at = -_ASKED_AGAIN_S

        def obeys() -> bool:
            nonlocal told_at
            if not self.running() or f"guest: obeys {text}\n" in self.output()[begun_at:]:
                return True
            if time.monotonic() - told_at > _ASKED_AGAIN_S:
                told_at = time.monotonic()
                self.tell(text)
            return False

        try:
            wait_for(f"guest {self.name} to {text}", obeys, timeout_s=timeout_s)
        except LabError as error:
            raise LabError(f"{error}\n{self._tail()}") from None

    def tell(self, text: str) -> None:
        """Write a line to the guest, which may hear another; see guest-init.sh."""
        self._ordered_at = len(self.output())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have ended
            self._serial.sendall(text.encode() + b"\n")

    def run(self, command: str, *, check: bool = True, timeout_s: float = 60) -> str:
        """Run a shell command in the guest, which must be ready; return what it wrote.

        Raises LabError when the guest ends, when it takes longer than `timeout_s`, or, with
        `check`, when the command fails.
        """
        self._commands += 1
        mark = f"command-{self._commands}"
        order = run_order(mark, command)
        self.tell(order)
        asked_at = time.monotonic()

        def said() -> tuple[int, str] | None:
            nonlocal asked_at
            self.check_running()
            result = result_in(self._heard(), mark)
            if not result and time.monotonic() - asked_at > _ASKED_AGAIN_S:
                asked_at = time.monotonic()
                self.tell(order)
            return result

        try:
            status, output = wait_for(f"guest {self.name}: {command}", said, timeout_s=timeout_s)
        except LabError as error:
            raise LabError(f"{error}\n{self._tail()}") from None
        if check and status != 0:
            raise LabError(f"guest {self.name}: {command}: failed with {status}\n{output}")
        return output

    def reset(self) -> None:
        """Press the reset button; wait_ready() then waits until the guest is up again."""
        self._ordered_at = len(self.output())
        with Qmp(self.qmp_socket) as client:
            client.command("system_reset")
            # That is a request only.
            client.wait_event("RESET")

    def powerdown(self) -> None:
        """Press the power button (ACPI); the guest then powers off by itself."""
        self.qmp("system_powerdown")

    def qmp(self, command: str, **arguments: object) -> Any:
        """Execute a QMP command on the guest's `.qmp` socket."""
        with Qmp(self.qmp_socket) as client:
            return client.command(command, **arguments)

    def signal(self, number: signal.Signals) -> None:
        """Send QEMU a signal; raises LabError when it has ended already."""
        try:
            signal.pidfd_send_signal(self._process, number)
        except ProcessLookupError:
            raise LabError(f"guest {self.name} has ended already") from None

    def running(self) -> bool:
        """Whether QEMU runs; a paused guest's does, too."""
        return not select.select([self._process], [], [], 0)[0]

    def wait(self, timeout_s: float = 60) -> None:
        """Wait until QEMU has ended; raises LabError when it has not after `timeout_s`."""
        if not select.select([self._process], [], [], timeout_s)[0]:
            raise LabError(f"guest {self.name} still runs after {timeout_s:g} s\n{self.output()}")

    def output(self) -> str:
        """The guest's output on its serial line so far."""
        return self._heard().decode(errors="replace")

    def _heard(self) -> bytes:
        heard = self._log.read_bytes() if self._log.exists() else b""
        return heard.replace(b"\r\n", b"\n")

    def check_running(self) -> None:
        """Raises LabError, with what QEMU and its guest said last, when it has ended."""
        if not self.running():
            ending = self._qemu.trouble()
            raise LabError(f"guest {self.name} has ended: {ending}\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self.output().splitlines()[-_SHOWN_LINES:])

    def close(self) -> None:
        """End QEMU, if it still runs, and forget it."""
        if self.running():
            self.signal(signal.SIGKILL)
            self.wait()
        self._reader.join()
        os.close(self._process)

    def _drain(self) -> None:
        """Read the serial line until QEMU ends, and forget it: the log has it, too.

        QEMU sends byte by byte, and the kernel charges each byte with a whole buffer: after three
        hundred unread bytes the guest would stand still.
        """
        with contextlib.suppress(OSError):
            while self._serial.recv(4096):
                pass


def run_order(mark: str, command: str) -> str:
    """The order to run a shell command, which a guest that misheard it does not obey."""
    return f"run {mark} {hashlib.md5(f'{mark} {command}'.encode()).hexdigest()} {command}"


def result_in(heard: bytes, mark: str) -> tuple[int, str] | None:
    """The status and output of the command with that mark, once it was heard whole.

    The emulated line is known to lose characters and to send them twice; both ends add a digest.
    """
    begins = f"guest: {mark} begins\n".encode()
    for ended in re.finditer(rf"guest: {mark} ended with (\d+) (\w+)  -\n".encode(), heard):
        start = heard.rfind(begins, 0, ended.start())
        output = heard[start + len(begins) : ended.start()]
        if start >= 0 and hashlib.md5(output).hexdigest().encode() == ended[2]:
            return int(ended[1]), output.decode(errors="replace")
    return None


@contextmanager
def start_guest(
    machine: Machine,
    name: str,
    *,
    control_dir: str | Path = "/run/brine/ctrl",
    no_reboot: bool = False,
    no_shutdown: bool = False,
    panic_device: bool = False,
    user: str = "",
    kvm: bool = False,
    extra_args: Sequence[str] = (),
) -> Iterator[Guest]:
    """A guest that has begun to boot; its QEMU is killed, if it still runs, when the context ends.

    It has the QMP sockets `<name>.kvmd` and `<name>.qmp` in the control directory, an absolute path
    of the machine. `no_reboot` and `no_shutdown` are QEMU's options of those names; `panic_device`
    gives it a pvpanic device, through which a guest tells QEMU that it panicked. With `user`, QEMU
    is that user's from the start, who must be able to write the control directory. With `kvm` it
    is not QEMU that does the guest's work but the kernel, which must be able to.
    """
    options = list(extra_args)
    options += ["-no-reboot"] if no_reboot else []
    options += ["-no-shutdown"] if no_shutdown else []
    options += ["-device", "pvpanic-pci"] if panic_device else []
    options += ["-accel", "kvm" if kvm else "tcg"]
    with ExitStack() as stack:
        control = Path(control_dir)
        start = _on_host if isinstance(machine, Host) else _in_node
        qemu = stack.enter_context(start(machine, name, control, options, user))
        serial = stack.enter_context(_connected(qemu, name))
        guest = Guest(name, machine.path(control), serial, qemu)
        stack.callback(guest.close)
        yield guest


@dataclass(frozen=True)
class _Qemu:
    """A QEMU that was started: its folder, as this process finds it, and what ails it.

    `trouble` is empty while QEMU runs, and what it wrote when it has ended.
    """

    folder: Path
    trouble: Callable[[], str]


@contextmanager
def _on_host(
    machine: Machine, name: str, control: Path, options: Sequence[str], user: str
) -> Iterator[_Qemu]:
    """Start QEMU as a child of this process."""
    require_commands("a guest", ["qemu-system-x86_64"])
    image = guest_image()
    with tempfile.TemporaryDirectory(prefix="brine-guest-") as scratch:
        folder = Path(scratch)
        become = []
        if user:
            shutil.chown(folder, user)
            # Before the wish to end with us: a process that becomes another user loses it.
            become = ["setpriv", f"--reuid={user}", f"--regid={_group_of(user)}", "--clear-groups"]
        args = _qemu_args(name, image.folder, folder, control, options)
        output = folder / "qemu.log"
        with output.open("w") as file:
            process = subprocess.Popen(
                machine.command([*become, *ending_with_us(), *args]),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

        def trouble() -> str:
            if process.poll() is None:
                return ""
            return f"QEMU's status is {process.returncode}: {output.read_text()}"

        try:
            yield _Qemu(folder, trouble)
        finally:
            process.kill()
            process.wait()


@contextmanager
def _in_node(
    machine: Machine, name: str, control: Path, options: Sequence[str], user: str
) -> Iterator[_Qemu]:
    """Start QEMU in a unit of its own."""
    image = guest_image()
    folder = Path(_NODE_FOLDER)
    if not machine.path(folder / "initramfs").exists():
        machine.put(image.folder, folder)
    unit = f"brine-lab-guest-{name}.service"
    properties = ["--property=UMask=0007"]
    lines = folder
    if user:
        lines = folder / user
        machine.run(["install", "--directory", f"--owner={user}", lines])
        properties.append(f"--property=User={user}")
    elif f"\n{GROUP}:" in machine.read("/etc/group"):
        properties.append(f"--property=Group={GROUP}")
    args = _qemu_args(name, folder, lines, control, options)
    machine.path(lines / f"{name}.log").unlink(missing_ok=True)
    machine.run(["systemd-run", "--quiet", "--collect", f"--unit={unit}", *properties, *args])

    def trouble() -> str:
        if machine.run(["systemctl", "is-active", "--quiet", unit], check=False).returncode == 0:
            return ""
        said = ["journalctl", "--no-pager", "--lines=5", f"--unit={unit}"]
        return machine.run(said, check=False).stdout

    yield _Qemu(machine.path(lines), trouble)


def _group_of(user: str) -> str:
    return grp.getgrgid(pwd.getpwnam(user).pw_gid).gr_name


def _connected(qemu: _Qemu, name: str) -> socket.socket:
    """A connection to the serial line of a QEMU that is just starting."""

    def connect() -> socket.socket | None:
        serial = socket.socket(socket.AF_UNIX)
        try:
            serial.connect(str(qemu.folder / f"{name}.serial"))
        except (FileNotFoundError, ConnectionRefusedError):
            serial.close()
            if trouble := qemu.trouble():
                raise LabError(f"guest {name} did not start\n{trouble}") from None
            return None
        return serial

    return wait_for(f"the serial line of guest {name}", connect, timeout_s=START_TIMEOUT_S)


def _qemu_args(
    name: str, image: Path, folder: Path, control: Path, options: Sequence[str]
) -> list[str]:
    """The command line of a guest whose kernel is in `image`; all are paths of its machine."""
    return [
        "qemu-system-x86_64",
        *("-name", name),
        *("-m", str(MEMORY_MIB)),
        *("-nodefaults", "-no-user-config", "-display", "none"),
        *("-kernel", str(image / "kernel"), "-initrd", str(image / "initramfs")),
        *("-append", f"console=ttyS0 {KERNEL_OPTIONS}"),
        *("-qmp", f"unix:{control}/{name}.kvmd,server=on,wait=off"),
        *("-qmp", f"unix:{control}/{name}.qmp,server=on,wait=off"),
        # Last, so that a guest whose serial line answers has its QMP sockets, too. The log has what
        # the guest said before a client listened.
        "-chardev",
        f"socket,id=serial,path={folder}/{name}.serial,server=on,wait=off,logfile={folder}/{name}.log",
        *("-serial", "chardev:serial"),
        *options,
    ]
