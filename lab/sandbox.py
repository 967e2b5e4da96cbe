"""A private view of the machine, in which two daemons may run on their compiled-in paths.

Own mount, network and process namespaces: what is mounted or started there is gone when it ends,
and nothing outside is touched.
"""

import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from lab.errors import LabError

HIDDEN = (Path("/run"), Path("/var/lib"), Path("/var/log"))
"""Empty inside, each a tmpfs of its own."""
_QUEUE_LENGTH = Path("/proc/sys/net/unix/max_dgram_qlen")
# From linux/sockios.h and linux/if.h.
_SIOCSIFFLAGS = 0x8914
_IFF_UP, _IFF_RUNNING = 0x1, 0x40


def run_module(module: str, arguments: Sequence[str], *, needs: Sequence[Path]) -> str:
    """Run a Python module in a sandbox and return what it wrote to standard output.

    `needs` are the paths that must still be seen inside. Raises LabError when the module fails
    (it has told why on standard error), or when the sandbox can't be made.
    """
    for path in needs:
        for hidden in HIDDEN:
            if path.resolve().is_relative_to(hidden):
                raise LabError(
                    f"{path} would be hidden: the benchmark runs with an empty {hidden}",
                    hint="keep the source tree and BRINE_CACHE elsewhere",
                )
    command = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0:
        command += ["--user", "--map-root-user"]
    command += [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        output, _ = process.communicate()
    finally:
        # --kill-child: with unshare goes the first process inside, and with that one all others.
        process.kill()
        process.wait()
        signal.signal(signal.SIGTERM, before)
    if process.returncode != 0:
        raise LabError(
            f"the measuring process ended with {process.returncode}",
            hint="its own message is above; if unshare was refused, run as root",
        )
    return output


def hide_state(files: Mapping[Path, str]) -> None:
    """Inside the sandbox: cover the machine's state with empty folders, then write these files."""
    for folder in HIDDEN:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", folder], check=True)
    # What systemd sets when it boots a machine (sysctl.d); a user's own namespace can't.
    with contextlib.suppress(OSError):
        _QUEUE_LENGTH.write_text("512", encoding="ascii")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def raise_loopback() -> None:
    """Inside the sandbox: bring up the loopback interface, its network's only one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        # struct ifreq: the name, and a union of which the first two bytes are the flags.
        request = struct.pack("16sh22x", b"lo", _IFF_UP | _IFF_RUNNING)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def _exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
