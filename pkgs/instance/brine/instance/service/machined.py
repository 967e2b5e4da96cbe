"""systemd-machined: ``machinectl list`` shows instances, where it is installed.

Nothing of Brine depends on it. A start gives it the instance's name and the process, and does not
wait for an answer; it finds the unit of the process, and forgets the instance when that has ended.
It refuses names that no host could have, such as one with an underscore.

Source: :manpage:`org.freedesktop.machine1(5)`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SERVICE_FILE = Path("/usr/share/dbus-1/system-services/org.freedesktop.machine1.service")
"""It is there where systemd-machined is installed, which begins when it is asked."""

PROGRAM = "/usr/bin/busctl"
_CALL = (
    *("call", "--system", "--quiet", "--timeout=10"),
    *("org.freedesktop.machine1", "/org/freedesktop/machine1", "org.freedesktop.machine1.Manager"),
    *("RegisterMachine", "sayssus"),
)


def register_machine(name: str, uuid: str, pid: int) -> None:
    """Begin to register an instance.

    :param uuid: of its spec.
    :param pid: of its QEMU, or what stands for its domain.
    """
    if not pid or not SERVICE_FILE.exists():
        return
    identity = bytes.fromhex(uuid.replace("-", ""))
    words = [name, str(len(identity)), *map(str, identity), "brine", "vm", str(pid), ""]
    nothing = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
    with contextlib.suppress(OSError):  # no busctl: then nobody asks machined either
        os.posix_spawn(
            PROGRAM, [PROGRAM, *_CALL, *words], {"LANG": "C.UTF-8"}, file_actions=nothing
        )
