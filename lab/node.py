"""Throw-away Debian nodes with their own systemd, in systemd-nspawn containers.

A node runs on an overlay over a cached tree, so that it starts in a second and nothing of it stays.
"""

from __future__ import annotations

import json
import os
import pwd
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from lab.cache import in_use
from lab.cgroups import own_group
from lab.command import Arguments, CommandError, ending_with_us, run_command
from lab.errors import LabError
from lab.images import bare_image, node_image
from lab.leftovers import left_over, own_name
from lab.machine import Machine, booted_with_systemd, require_commands, require_root
from lab.mirrors import open_the_way_to_mirrors
from lab.tree import clone, copy_sources
from lab.waiting import wait_for

BOOT_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0

# Where a fresh machine has the tree.
CLONE = "/srv/brine"

# What commands in a node see, whatever the caller's environment is.
_ENVIRONMENT = {
    "HOME": pwd.getpwuid(0).pw_dir,
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "TERM": os.environ.get("TERM", "dumb"),
}

# Hardened units, tap devices and nodes within the node ask for what nspawn withholds by default.
_PRIVILEGES = ["--capability=all", "--system-call-filter=@mount @keyring bpf"]
_DEVICES = ["/dev/net/tun"]

_KEEP_FILES = Path(__file__).with_name("keep-files.sh")


class Node(Machine):
    """A running node. `pid` is its PID 1, as this process's PID namespace numbers it.

    `nspawn` is the process that started it.
    """

    def __init__(self, name: str, pid: int, console: Path, nspawn: int) -> None:
        self.name = name
        self.console = console
        self._nspawn = nspawn
        self._is(pid)

    def _is(self, pid: int) -> None:
        self.pid = pid
        self.root = Path(f"/proc/{pid}/root")

    def command(self, args: Arguments) -> list[str]:
        environment = [f"{key}={value}" for key, value in _ENVIRONMENT.items()]
        enter = ["nsenter", "--target", str(self.pid), "--all", "env", "--ignore-environment"]
        return [*enter, *environment, *(str(arg) for arg in args)]

    def journal(self, *matches: str) -> list[dict[str, Any]]:
        """The node's journal since its boot, oldest first: one dictionary of fields a record.

        `matches` are journalctl's own: options, and FIELD=value.
        """
        # Records reach the journal asynchronously; --sync waits for those already sent.
        self.run(["journalctl", "--sync"])
        options = ["--boot", "--no-pager", "--output=json", "--all"]
        lines = self.run(["journalctl", *options, *matches]).stdout.splitlines()
        return [json.loads(line) for line in lines]

    def reboot(
        self,
        *,
        by: Sequence[str] = ("systemctl", "--no-block", "reboot"),
        timeout_s: float = BOOT_TIMEOUT_S,
    ) -> float:
        """Reboot a node that was booted with `keeps_files`, and return when it is up again.

        `by` is the command that has it reboot, at once or later. Returns how long it took to go
        down, in seconds. Raises LabError when that, or a step of its start, takes longer than
        `timeout_s`, or it does not get to `running`.
        """
        with _descriptor_of(self.pid) as init:
            begun = time.monotonic()
            self.run(by)
            self._wait_down(init, timeout_s)
            took_s = time.monotonic() - begun
        self._wait_up("running", timeout_s)
        return took_s

    @contextmanager
    def rebooting(
        self, *, state: str = "running", timeout_s: float = BOOT_TIMEOUT_S
    ) -> Iterator[None]:
        """What is done meanwhile has the node reboot, from wherever that is said; it was booted
        with `keeps_files`. It is up again at the end, in the `state` of systemd's that is named."""
        with _descriptor_of(self.pid) as init:
            yield
            self._wait_down(init, timeout_s)
        self._wait_up(state, timeout_s)

    def reset(self, *, timeout_s: float = BOOT_TIMEOUT_S) -> None:
        """Have a node that was booted with `keeps_files` end at once, as by a loss of power, and
        return when it is up again. Nothing in it hears of that. What it has written is all there:
        its files are in this machine's memory.

        Raises LabError when it does not get to `running`.
        """
        with self.rebooting(timeout_s=timeout_s):
            (self.console.parent / "reset").touch()
            os.kill(self.pid, signal.SIGKILL)

    def _wait_down(self, init: int, timeout_s: float) -> None:
        if not select.select([init], [], [], timeout_s)[0]:
            raise LabError(f"node {self.name} was not down {timeout_s:g} s after its reboot")

    def _wait_up(self, state: str, timeout_s: float) -> None:
        self._is(_wait_for_init(self.name, self._nspawn, self.console, timeout_s=timeout_s))
        _wait_until(state, self, timeout_s=timeout_s)

    def enter(self, args: Sequence[str] = ("bash", "--login")) -> int:
        """Run a command on the caller's own terminal, and return its exit status."""
        return subprocess.run(self.command(args), check=False).returncode


@contextmanager
def boot_node(
    release: str,
    *,
    image: Callable[[str], Path] = node_image,
    name: str = "",
    network_bridge: str = "",
    bind_read_only: Sequence[Path] = (),
    bind: Sequence[Path] = (),
    keeps_files: bool = False,
) -> Iterator[Node]:
    """A node of a Debian release, up and `running`; it is gone when the context ends.

    `image` makes the tree that it boots from: `lab.images.node_image`, or `lab.fedora.dnf_image`.
    It has no network but its own loopback, or, with `network_bridge`, one interface `host0` on that
    bridge. `name` becomes its host name. `bind_read_only` are folders of the host that it sees
    under the same paths; `bind` are those that it may write, too. With `keeps_files` it has after a
    reboot what it had before, until the context ends.

    Raises LabError when it does not get to `running`, with the failed units.
    """
    binds = [f"--bind-ro={path}" for path in bind_read_only]
    binds += [f"--bind={path}" for path in bind]
    options = [*_network(network_bridge), *binds]
    with _started(
        image(release), name or f"{release}-node", options, keeps_files=keeps_files
    ) as node:
        _wait_until_running(node)
        yield node


@contextmanager
def boot_nodes(
    release: str, names: Iterable[str], *, network_bridge: str = "", keeps_files: bool = False
) -> Iterator[list[Node]]:
    """Nodes of these names, which boot side by side; see `boot_node`.

    All of them are gone when the context ends, or when one does not get to `running`.
    """
    tree = node_image(release)
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                _started(tree, name, _network(network_bridge), keeps_files=keeps_files)
            )
            for name in names
        ]
        for node in nodes:
            _wait_until_running(node)
        yield nodes


@contextmanager
def fresh_machine(release: str, *, name: str = "") -> Iterator[Node]:
    """A machine as Debian's installer leaves it, to play a new user on; gone with the context.

    It has systemd, apt and little else, and a clone of the tree in CLONE. It shares the host's
    network, and reaches the package mirrors as the host does. Nodes can be booted within it.
    """
    options = ["--resolv-conf=replace-host"]
    with _started(bare_image(release), name or f"fresh-{release}", options) as node:
        _wait_until_running(node)
        open_the_way_to_mirrors(node)
        copy_sources(clone(), node.path(CLONE))
        yield node


def _network(bridge: str) -> list[str]:
    return [f"--network-bridge={bridge}"] if bridge else ["--private-network"]


@contextmanager
def _started(
    tree: Path, name: str, options: Sequence[str], *, keeps_files: bool = False
) -> Iterator[Node]:
    """A node whose init has begun to boot it; gone with the context."""
    require_root("a node")
    require_commands("a node", ["systemd-nspawn", "nsenter"])
    # Names of containers are the host's: two nodes may have one host name, not one of these.
    machine = own_name()
    for dead in left_over(Path(tempfile.gettempdir())):
        shutil.rmtree(dead, ignore_errors=True)
    with ExitStack() as stack:
        stack.enter_context(in_use(tree.parent))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{machine}-")))
        console = folder / "console"
        nspawn_on = ["systemd-nspawn", f"--directory={tree}", "--volatile=overlay"]
        if keeps_files:
            keep = ["unshare", "--mount", "bash", str(_KEEP_FILES), str(tree), str(folder)]
            nspawn_on = [*keep, "systemd-nspawn", f"--directory={folder}/root"]
        args = [
            *nspawn_on,
            "--quiet",
            "--boot",
            "--register=no",
            "--keep-unit",
            "--console=pipe",
            # SIGTERM ends a node at once; were nspawn killed, the node would outlive it.
            "--kill-signal=SIGKILL",
            f"--machine={machine}",
            f"--hostname={name}",
            *_PRIVILEGES,
            *(f"--bind={device}" for device in _DEVICES if Path(device).exists()),
            *options,
        ]
        start = _started_as_unit if booted_with_systemd() else _started_as_child
        nspawn = stack.enter_context(start(machine, args, console))
        stack.callback(_kill_init_of, nspawn, console)
        yield Node(name, _wait_for_init(name, nspawn, console), console, nspawn)


@contextmanager
def _started_as_child(machine: str, args: list[str], console: Path) -> Iterator[int]:
    """Start nspawn where PID 1 is not systemd, and give its PID."""
    # nspawn must be told to give the node the one hierarchy that its systemd wants.
    environment = {**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}
    with own_group(machine) as in_own_group, console.open("w") as output:
        process = subprocess.Popen(
            [*ending_with_us("TERM"), *in_own_group, *args],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            # ^C at the terminal is for the program that uses the node, which then ends it.
            start_new_session=True,
        )
        try:
            yield process.pid
        finally:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _started_as_unit(machine: str, args: list[str], console: Path) -> Iterator[int]:
    """Start nspawn in a unit of its own, as it wants where PID 1 is systemd; give its PID."""
    unit = f"{machine}.service"
    properties = [
        "--property=Delegate=yes",
        "--property=KillMode=mixed",
        f"--property=StandardOutput=truncate:{console}",
        f"--property=StandardError=append:{console}",
        "--setenv=SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1",
    ]
    run_command(["systemd-run", "--quiet", "--collect", f"--unit={unit}", *properties, *args])
    try:
        main_pid = run_command(["systemctl", "show", "--property=MainPID", "--value", unit]).stdout
        yield int(main_pid)
    finally:
        try:
            run_command(["systemctl", "stop", unit], check=False, timeout_s=STOP_TIMEOUT_S)
        except CommandError:  # it took too long; nspawn's end is the node's
            kill = ["systemctl", "kill", "--signal=SIGKILL", unit]
            with suppress(CommandError):
                run_command(kill, check=False, timeout_s=STOP_TIMEOUT_S)


@contextmanager
def _descriptor_of(pid: int) -> Iterator[int]:
    """A descriptor by which a process can be waited for that is no child of ours."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _wait_for_init(
    name: str, nspawn: int, console: Path, *, timeout_s: float = BOOT_TIMEOUT_S
) -> int:
    """Wait for the init of a node that starts; returns its PID."""
    return wait_for(
        f"the init of node {name}", lambda: _init_of(nspawn, console), timeout_s=timeout_s
    )


def _init_of(nspawn: int, console: Path) -> int | None:
    """The PID of the node's init: what nspawn, or one that it was started by, has as PID 1 in a PID
    namespace of its own.

    Raises LabError when nspawn has ended.
    """
    if not _status_of(nspawn):
        raise LabError(f"the node did not start:\n{_said(console)}")
    children = _children(nspawn)
    for child in children:
        status = _status_of(child)
        command = status.get("Name")
        if command == "systemd-nspawn":
            children += _children(child)
        numbers = status.get("NSpid", "").split()
        # Until it executes the node's init, the child still prepares the node's files.
        if numbers[1:] and numbers[-1] == "1" and command == "systemd":
            return child
    return None


def _status_of(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status of a process; empty when it has ended."""
    # Where the process ends between opening and reading, the kernel says ESRCH.
    with suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if not status["State"].startswith(("Z", "X")):
            return status
    return {}


def _children(pid: int) -> list[int]:
    """The children of a process; none when it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(child) for child in text.split()]
    return []


def _wait_until_running(node: Node) -> None:
    _wait_until("running", node, timeout_s=BOOT_TIMEOUT_S)


def _wait_until(state: str, node: Node, *, timeout_s: float) -> None:
    """Wait until a node has booted; raises LabError if systemd's state is another one then."""
    wait_for(
        f"the message bus of node {node.name}",
        lambda: node.path("/run/dbus/system_bus_socket").exists(),
        timeout_s=timeout_s,
    )
    is_up = ["systemctl", "is-system-running", "--wait"]
    found = node.run(is_up, check=False, timeout_s=timeout_s).stdout.strip()
    if found != state:
        failed = node.run(["systemctl", "--failed", "--plain", "--no-legend"], check=False).stdout
        said = _said(node.console)
        raise LabError(f"node {node.name} is {found or 'not up'}, not {state}\n{failed}{said}")


def _said(console: Path) -> str:
    """The text on a node's console; a unit that did not start has made none."""
    return console.read_text(errors="replace") if console.exists() else "(nothing)"


def _kill_init_of(nspawn: int, console: Path) -> None:
    """End a node at once: the kernel ends everything in a PID namespace with its PID 1."""
    with suppress(LabError, ProcessLookupError):  # it may be off already
        if pid := _init_of(nspawn, console):
            os.kill(pid, signal.SIGKILL)
