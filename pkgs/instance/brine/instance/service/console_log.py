"""``brine-console-log.service``: logs the serial lines of all guests.

A pipe without a reader stops the QEMU that writes to it, and so its guest. So the reader never
waits for a disk: a thread writes the logs, and memory keeps what it has not written yet, the last
:data:`LOG_BYTES` of each guest. systemd kills a reader that hangs (WatchdogSec=); then writes to
the pipe fail at once, and the output until the next start of the reader is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import stat
from dataclasses import dataclass, field

from brine.common import journal, paths
from brine.common.errors import printable
from brine.common.inotify import DirectoryWatch
from brine.common.systemd import ServiceManager
from brine.instance.serial_log import LOG_BYTES, append
from brine.vm.files import InstanceFiles
from brine.vm.values import vm_name_fault

log = logging.getLogger(__name__)

_PROGRAM = "brine-console-log"
_READ_SIZE = 64 * 1024
_WRITE_EVERY_S = 0.5
_LOOK_EVERY_S = 10.0
_MOST_AT_A_TIME = 8 * 1024 * 1024
"""More than a serial line carries in half a second; a QEMU that sends more has to wait."""


@dataclass
class SerialLine:
    """An instance's pipe.

    :param unwritten: the output that is not in the log yet.
    :param received: bytes since the last write.
    """

    name: str
    descriptor: int
    unwritten: bytearray = field(default_factory=bytearray)
    received: int = 0

    def read(self) -> bool:
        """Read the pipe; returns whether there was any output."""
        try:
            data = os.read(self.descriptor, _READ_SIZE)
        except BlockingIOError:
            return False
        self.received += len(data)
        self.keep(self.unwritten + data)
        return bool(data)

    def keep(self, output: bytes | bytearray) -> None:
        """Keep the end of unwritten output in memory."""
        self.unwritten[:] = output[-LOG_BYTES:]

    def is_there(self) -> bool:
        """Whether the pipe still has its name, and no other has taken its place."""
        try:
            there = InstanceFiles(self.name).console_pipe.lstat()
            return os.path.samestat(there, os.fstat(self.descriptor))
        except OSError:  # it is closed already, or removed
            return False


class ConsoleReader:
    """Reads all pipes of :data:`brine.common.paths.CONSOLE_DIR`, and those that appear there."""

    def __init__(self, service: ServiceManager) -> None:
        self._service = service
        self._lines: dict[str, SerialLine] = {}
        self._failing: set[str] = set()
        self._loop = asyncio.get_running_loop()

    async def run(self, end: asyncio.Event) -> None:
        """Read until *end* is set; then the logs have all output."""
        watch = DirectoryWatch(paths.CONSOLE_DIR, appeared=self._appeared, rescan=self._rescan)
        watch.start()
        self._begin_anew()
        looked_at = self._loop.time()
        while not end.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), _WRITE_EVERY_S)
            self._service.alive()
            await self._write()
            if self._loop.time() - looked_at >= _LOOK_EVERY_S:
                looked_at = self._loop.time()
                if not watch.refresh():
                    self._rescan()
        watch.close()
        for line in self._lines.values():
            while line.received < _MOST_AT_A_TIME and line.read():
                pass
        await self._write()

    def _rescan(self) -> None:
        for line in [line for line in self._lines.values() if not line.is_there()]:
            self._close(line)
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(paths.CONSOLE_DIR):
                self._appeared(name)

    def _appeared(self, name: str) -> None:
        if vm_name_fault(name):
            return
        if line := self._lines.get(name):
            if line.is_there():
                return
            self._close(line)
        try:
            # Opened for writing, too: otherwise it would be at its end whenever no QEMU has it
            # open.
            flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(InstanceFiles(name).console_pipe, flags)
        except OSError as error:
            self._warn(name, error)
            return
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return
        line = self._lines[name] = SerialLine(name, descriptor)
        self._loop.add_reader(descriptor, self._read, line)

    def _read(self, line: SerialLine) -> None:
        line.read()
        if line.received >= _MOST_AT_A_TIME:
            self._loop.remove_reader(line.descriptor)

    def _close(self, line: SerialLine) -> None:
        self._loop.remove_reader(line.descriptor)
        os.close(line.descriptor)
        del self._lines[line.name]

    def _begin_anew(self) -> None:
        """Reset the counters of received bytes, even while a write takes long."""
        for line in self._lines.values():
            if line.received >= _MOST_AT_A_TIME:
                self._loop.add_reader(line.descriptor, self._read, line)
            line.received = 0
        self._loop.call_later(_WRITE_EVERY_S, self._begin_anew)

    async def _write(self) -> None:
        for line in list(self._lines.values()):
            if not line.unwritten or not line.is_there():
                continue
            data = bytes(line.unwritten)
            line.unwritten.clear()
            writing = asyncio.create_task(asyncio.to_thread(append, line.name, data))
            # A disk that hangs must not look like a program that hangs.
            while not (await asyncio.wait({writing}, timeout=_LOOK_EVERY_S))[0]:
                self._service.alive()
            try:
                await writing
            except OSError as error:
                line.keep(data + line.unwritten)
                self._warn(line.name, error)
            else:
                self._failing.discard(line.name)

    def _warn(self, name: str, error: OSError) -> None:
        """Report an error once, until it is gone."""
        if name not in self._failing:
            log.warning("%s: its serial line is not logged: %s", printable(name), error)
        self._failing.add(name)


async def _serve() -> None:
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    service = ServiceManager()
    service.ready("reading serial lines")
    await ConsoleReader(service).run(end)


def main() -> None:
    """Read until this program is told to end."""
    journal.setup(_PROGRAM, logging.INFO)
    asyncio.run(_serve())


if __name__ == "__main__":
    main()
