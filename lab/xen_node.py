"""Throw-away nodes with a real Xen, or a Debian kernel of their own, which QEMU runs in software
emulation.

To boot one takes minutes. So that is done once: the state of a booted node is cached, and a node
that is wanted goes on from there, in seconds. It maps the cached memory privately, so that it
begins at once, and so that several nodes share what none of them has changed.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lab import xen_client
from lab.cache import cached, in_use
from lab.command import Arguments, CommandError, ending_with_us, run_command
from lab.errors import LabError
from lab.machine import Machine, require_commands
from lab.qmp import Qmp
from lab.waiting import wait_for
from lab.xen_client import Address
from lab.xen_image import XenImage, xen_image

MEMORY_MIB = 2560
DOM0_MEMORY_MIB = 768
BARE_MEMORY_MIB = 1536
"""Of a node without Xen."""

BOOT_TIMEOUT_S = 1500.0
RESUME_TIMEOUT_S = 300.0
_START_TIMEOUT_S = 60.0
_SAVE_TIMEOUT_S = 600.0
_ALIVE_TIMEOUT_S = 20.0

LONGEST_S = 1800.0
"""Enough for any command and any wait: a command takes seconds on an emulated processor, a domain
boots in minutes, and other tests may run beside."""


_AGENT_PORT = 22
_CLIENT = Path(xen_client.__file__)

# With SMAP, dom0 dies in its first iret under emulation. RDTSCP is reported to Xen as RDTSC, which
# ends a PVH domain. With XSAVE or two processors, programs in dom0 crashed while domains ran.
_CPU = ["-cpu", "max,-smap,-rdtscp,-xsave", "-smp", "1"]
_XEN = f"console=com1 com1=115200,8n1 dom0_mem={DOM0_MEMORY_MIB}M,max:{DOM0_MEMORY_MIB}M"
# What is against attacks costs time, and so does cleaning all memory first.
_XEN += " bootscrub=0 spec-ctrl=no,eager-fpu=1 xpti=no loglvl=error"
_NO_XEN = "console=ttyS0 no_timer_check"
_DOM0 = "console=hvc0 net.ifnames=0 mitigations=off audit=0 quiet systemd.service_watchdogs=no"

# A domain that boots takes the one processor for minutes, and systemd and xl give up in dom0.
_DOM0_FIRST = "xl sched-credit2 -d Domain-0 -w 65535"

# Files of a saved node beside those of its image.
_RAM = "ram"
_DEVICES = "devices"

# Without it, QEMU would write the memory into the file of the devices' state, and read it back.
_SHARED_STAYS = [{"capability": "x-ignore-shared", "state": True}]


class XenNode(Machine):
    """A running Xen node: its commands run in dom0.

    Its files are in another machine: read(), write() and put() are there, path() is not.
    """

    limit_s = LONGEST_S

    def __init__(self, name: str, address_file: Path, qmp: Path) -> None:
        self.name = name
        self._address_file = address_file
        self._qmp = qmp

    def command(self, args: Arguments) -> list[str]:
        client = [sys.executable, "-I", "-S", str(_CLIENT), str(self._address_file)]
        return [*client, *(str(arg) for arg in args)]

    def run(
        self,
        args: Arguments,
        *,
        check: bool = True,
        stdin: str = "",
        timeout_s: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        done = super().run(args, check=check, stdin=stdin, timeout_s=timeout_s)
        # Its silence is no answer, whatever the caller would do without one.
        if done.stderr.startswith(xen_client.TROUBLE):
            raise LabError(f"{self.name} does not answer: {done.stderr}")
        return done

    def path(self, inside: str | Path) -> Path:
        raise LabError(
            f"{inside} of {self.name} is in another machine", hint="use read(), write() or put()"
        )

    def put(self, source: Path, inside: str | Path) -> None:
        with self._unpacking() as archive:
            archive.add(source, _member(inside), filter=_of_root)

    def write(self, inside: str | Path, text: str, *, mode: int = 0o644) -> None:
        member = tarfile.TarInfo(_member(inside))
        content = text.encode()
        member.size, member.mode, member.mtime = len(content), mode, int(time.time())
        with self._unpacking() as archive:
            archive.addfile(member, io.BytesIO(content))

    def read(self, inside: str | Path) -> str:
        return self.run(["cat", inside]).stdout

    @contextmanager
    def _unpacking(self) -> Iterator[tarfile.TarFile]:
        """An archive that is unpacked in the node when the context ends; parents are made."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            yield archive
        args = ["tar", "--extract", "--directory=/", "--file=-"]
        reply = xen_client.call(Address.load(self._address_file), args, packed.getvalue())
        if reply.status:
            raise CommandError(f"tar on {self.name}", args, reply.status, "", str(reply.stderr))

    def link(self, own: Path, other: Path) -> None:
        """Give the node a second NIC, `eth1`, on a wire to another node that is told the same the
        other way around.

        :param own: where QEMU makes a socket, and `other` is where that of the other node does.
        """
        mac = hashlib.sha256(str(own).encode()).hexdigest()
        ends = {"local": own, "remote": other}
        addresses = {key: {"type": "unix", "path": str(path)} for key, path in ends.items()}
        with Qmp(self._qmp, timeout_s=_START_TIMEOUT_S) as qemu:
            qemu.command("netdev_add", type="dgram", id="wire", **addresses)
            qemu.command(
                "device_add",
                driver="virtio-net-pci",
                id="wire-nic",
                netdev="wire",
                romfile="",
                mac=f"52:54:00:{mac[:2]}:{mac[2:4]}:{mac[4:6]}",
            )
        self.shell("until ip link set eth1 up; do sleep 0.5; done", timeout_s=RESUME_TIMEOUT_S)

    def save(self, devices: Path) -> None:
        """End the node so that it can go on later: what is not in its memory's file goes to one."""
        self.run(["sync"])
        with Qmp(self._qmp, timeout_s=_SAVE_TIMEOUT_S) as qemu:
            qemu.command("stop")
            qemu.command("migrate-set-capabilities", capabilities=_SHARED_STAYS)
            qemu.command("migrate", uri=f"exec:cat >'{devices}'")
            _wait_migrated(qemu, f"{self.name} to be saved")
            qemu.command("quit")


@contextmanager
def boot_xen_node(release: str, *, state: Path | None = None) -> Iterator[XenNode]:
    """A node of a Debian release with its Xen, up and running; it is gone when the context ends.

    It is as it was when it had booted, or, with `state`, as saved_xen_node() left it. It has no
    network but its own loopback.
    """
    folder = state or _booted(release)
    with in_use(folder), _resumed(release, folder, keep=False) as node:
        yield node


@contextmanager
def boot_without_xen(release: str) -> Iterator[XenNode]:
    """The same node without Xen: what QEMU runs in it has KVM, which is emulated, and its kernel,
    which is Debian's own, maps devices. It is gone when the context ends."""
    require_commands("a node with its own kernel", ["qemu-system-x86_64"])
    folder = xen_image(release).folder
    with in_use(folder), _started(release, folder, keep=False, has_xen=False) as (node, qemu):
        _wait_until_up(node, qemu, BOOT_TIMEOUT_S)
        node.shell("modprobe -a kvm-amd dm-mod loop")
        yield node


def saved_xen_node(release: str, folder: Path, prepare: Callable[[XenNode], None]) -> Path:
    """Have `prepare` do something to a node, and save the node in the empty `folder`.

    Nodes of boot_xen_node(state=folder) go on from there. It takes some 500 MiB.
    """
    base = _booted(release)
    with in_use(base):
        _copy(base, folder)
    with _resumed(release, folder, keep=True) as node:
        prepare(node)
        # In place of that which it came from.
        node.save(folder / _DEVICES)
    return folder


def _booted(release: str) -> Path:
    """The cached state of a node that has booted."""
    require_commands("a Xen node", ["qemu-system-x86_64"])
    image = xen_image(release)

    def build(folder: Path) -> None:
        _copy(image.folder, folder)
        with _started(release, folder, keep=True) as (node, qemu):
            _wait_until_up(node, qemu, BOOT_TIMEOUT_S)
            try:
                node.run(["systemctl", "is-system-running", "--wait"], timeout_s=BOOT_TIMEOUT_S)
            except CommandError as error:
                failed = node.run(["systemctl", "--failed", "--plain", "--no-legend"]).stdout
                raise LabError(f"{error}\n{failed}") from None
            # So that these programs are in memory.
            node.shell(f"{_DOM0_FIRST}; xl info; xl list; python3 -c 'import json'")
            node.save(folder / _DEVICES)

    version = run_command(["qemu-system-x86_64", "--version"]).stdout
    recipe = inspect.getsource(sys.modules[__name__])
    with in_use(image.folder):
        what = f"a booted Xen node, {release}"
        return cached(f"xen-{release}-up", [image.folder.name, version, recipe], build, what=what)


@contextmanager
def _resumed(release: str, folder: Path, *, keep: bool) -> Iterator[XenNode]:
    """A node that goes on from where it was saved, in `folder`; with `keep` it works there."""
    with _started(release, folder, keep=keep, resume=True) as (node, qemu):
        _wait_until_up(node, qemu, RESUME_TIMEOUT_S)
        # Its clocks stood still.
        node.run(["date", "--set", f"@{time.time():.3f}"])
        yield node


@contextmanager
def _started(
    release: str, folder: Path, *, keep: bool, resume: bool = False, has_xen: bool = True
) -> Iterator[tuple[XenNode, subprocess.Popen[bytes]]]:
    """Start QEMU on the files in `folder`, to which it writes only if it is to `keep` that."""
    name = f"{release}-{'xen' if has_xen else 'kernel'}"
    image = XenImage(folder)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="brine-xen-")))
        socket = scratch / "qmp"
        log = stack.enter_context((scratch / "qemu.log").open("wb"))
        qemu = subprocess.Popen(
            [
                *ending_with_us(),
                *("qemu-system-x86_64", "-accel", "tcg"),
                *(_xen(image, keep=keep, resume=resume) if has_xen else _bare_kernel(image)),
                *_devices(image, socket, keep=keep),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # ^C at the terminal is for the program that uses the node, which then ends it.
            start_new_session=True,
        )
        stack.callback(qemu.wait)
        stack.callback(qemu.kill)
        monitor = wait_for(
            "QEMU", lambda: _monitor(socket, qemu, Path(log.name)), timeout_s=_START_TIMEOUT_S
        )
        with monitor:
            if resume:
                monitor.command("migrate-set-capabilities", capabilities=_SHARED_STAYS)
                monitor.command("migrate-incoming", uri=f"exec:cat '{folder / _DEVICES}'")
                _wait_migrated(monitor, f"{name} to be back")
                monitor.command("cont")
            forwards = monitor.command("human-monitor-command", **{"command-line": "info usernet"})
        port = re.search(r"HOST_FORWARD.* 127\.0\.0\.1 +(\d+)", forwards)
        assert port
        address_file = scratch / "address"
        Address(int(port[1]), image.token).save(address_file)
        yield XenNode(name, address_file, socket), qemu


def _xen(image: XenImage, *, keep: bool, resume: bool) -> list[str | Path]:
    """QEMU's processor, memory and what is booted."""
    share = "on" if keep else "off"
    memory = f"memory-backend-file,id=ram,size={MEMORY_MIB}M,mem-path={image.folder / _RAM}"
    return [
        *(*_CPU, "-m", f"{MEMORY_MIB}M"),
        *("-object", f"{memory},share={share}", "-machine", "pc,memory-backend=ram"),
        *("-kernel", image.hypervisor, "-append", _XEN),
        *("-initrd", f"{image.kernel} {_DOM0},{image.initramfs}"),
        *(("-incoming", "defer") if resume else ()),
    ]


def _bare_kernel(image: XenImage) -> list[str | Path]:
    """The same without Xen."""
    return [
        *("-cpu", "qemu64,+svm,+npt", "-smp", "2", "-m", f"{BARE_MEMORY_MIB}M"),
        *("-kernel", image.kernel, "-append", f"{_DOM0} {_NO_XEN}", "-initrd", image.initramfs),
    ]


def _devices(image: XenImage, qmp: Path, *, keep: bool) -> list[str | Path]:
    snapshot = "off" if keep else "on"
    return [
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-serial", f"file:{qmp.with_name('console')}"),
        "-drive",
        f"if=none,id=disk,file={image.disk},format=raw,cache=unsafe,snapshot={snapshot}",
        *("-device", "virtio-blk-pci,drive=disk"),
        "-netdev",
        f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:0-:{_AGENT_PORT}",
        *("-device", "virtio-net-pci,netdev=net,romfile="),
        *("-qmp", f"unix:{qmp},server=on,wait=off"),
    ]


def _monitor(socket: Path, qemu: subprocess.Popen[bytes], log: Path) -> Qmp | None:
    if qemu.poll() is not None:
        raise LabError(f"QEMU did not start: {log.read_text(errors='replace')}")
    try:
        return Qmp(socket, timeout_s=_START_TIMEOUT_S)
    except LabError:
        return None


def _wait_migrated(qemu: Qmp, what: str) -> None:
    def migrated() -> bool:
        found = qemu.command("query-migrate")
        if found.get("status") == "failed":
            raise LabError(f"waited for {what}, and it failed: {found.get('error-desc')}")
        return bool(found.get("status") == "completed")

    wait_for(what, migrated, timeout_s=_SAVE_TIMEOUT_S)


def _wait_until_up(node: XenNode, qemu: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait until the agent runs commands."""

    def up() -> bool:
        if qemu.poll() is not None:
            raise LabError(f"{node.name} has ended while it started")
        try:
            node.run(["true"], timeout_s=_ALIVE_TIMEOUT_S)
        except CommandError:
            return False
        return True

    wait_for(f"the agent of {node.name}", up, timeout_s=timeout_s, interval_s=0.5)


def _copy(source: Path, target: Path) -> None:
    run_command(["cp", "-a", "--sparse=always", "--reflink=auto", f"{source}/.", target])


def _member(inside: str | Path) -> str:
    return str(inside).lstrip("/")


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member
