"""``brine-stopper.service``: one process that stops all instances which systemd stops.

The stop command of an instance's unit, ``/usr/lib/brine/stop``, writes a line to the FIFO
``/run/brine/stopper.fifo``: the instance's name, the invocation id of its unit, and its main
process. As long as a thread works on it, a file of its name in ``/run/brine/stopper`` is locked
(:manpage:`flock(2)`); so the waiting command sees when none does. Only root may write to either.
"""

from __future__ import annotations

import fcntl
import os
import select
import threading

from brine.common import paths
from brine.common.errors import BrineError, tell_error, warn
from brine.instance import messages
from brine.instance.shutdown import stop_run
from brine.vm.run import Run
from brine.vm.values import vm_name_fault

FOLDER = paths.CONTROL_DIR.parent / "stopper"

_PROGRAM = "brine-stopper"
_FIFO = 3  # the first descriptor that systemd passes (sd_listen_fds(3))
_READ_SIZE = 64 * 1024
_IDLE_S = 30.0
_STACK_BYTES = 512 * 1024

_busy: set[str] = set()
_changes = threading.Lock()
"""Of what is in _busy, and of the files that say so."""


def main() -> None:
    """Do what the FIFO says, until there has been nothing to do for half a minute."""
    messages.log_to_journal(_PROGRAM)
    threading.stack_size(_STACK_BYTES)
    FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.set_blocking(_FIFO, False)  # systemd has it block
    stop_as_told(_FIFO, idle_s=_IDLE_S)


def stop_as_told(fifo: int, *, idle_s: float) -> None:
    """Stop each instance that a FIFO names, all at once, until it is idle for so many seconds.

    :param fifo: an open descriptor that does not block.
    """
    poll = select.poll()
    poll.register(fifo, select.POLLIN)
    rest = b""
    while poll.poll(idle_s * 1000) or threading.active_count() > 1:
        try:
            rest += os.read(fifo, _READ_SIZE)
        except BlockingIOError:
            continue
        *lines, rest = rest.split(b"\n")
        for line in lines:
            _begin(line.decode(errors="replace"))


def _begin(line: str) -> None:
    """Begin what a line says, unless a thread is at it already."""
    name, run, pid = (*line.split(" "), "", "")[:3]
    if vm_name_fault(name) or not run or not pid.isdecimal():
        warn(f"no such request: {line!r}", program=_PROGRAM)
        return
    with _changes:
        if name in _busy:
            return
        lock = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # A process that only tests the lock holds it for a moment.
        fcntl.flock(lock, fcntl.LOCK_EX)
        _busy.add(name)
    threading.Thread(target=_stop, args=(name, int(pid), run, lock)).start()


def _stop(name: str, pid: int, run: str, lock: int) -> None:
    try:
        stop_run(Run(name, run), pid)
    except BrineError as error:
        tell_error(error, program=_PROGRAM)
    finally:
        with _changes:
            (FOLDER / name).unlink(missing_ok=True)
            os.close(lock)
            _busy.remove(name)


if __name__ == "__main__":
    main()
