"""Volumes, and QEMUs as far as moves see them. What a QEMU does after a fault is what QEMU 7.2 and
10.0 did in the same place."""

from __future__ import annotations

from collections.abc import Callable

from lab.move_history import EventKind
from simulator.world import World


class Volume:
    """The writes that a volume has, with those that a loss of power takes."""

    def __init__(self, *, is_shared: bool = False) -> None:
        self.is_shared = is_shared
        self.is_open = False  # for another node's copies
        self.cached: set[int] = set()
        self._durable: set[int] = set()

    def write(self, number: int) -> None:
        """A write that is acknowledged: it survives a loss of power."""
        self.cached.add(number)
        self._durable.add(number)

    def sync(self) -> None:
        self._durable = set(self.cached)

    def lose_power(self) -> None:
        self.is_open = False
        if not self.is_shared:
            self.cached = set(self._durable)

    def fill(self, content: set[int]) -> bool:
        """Get a copy; nothing is synced. Returns False if it is closed."""
        if self.is_open:
            self.cached = set(content)
        return self.is_open


class Qemu:
    """A QEMU in an instance's unit, and its guest, which writes while it runs.

    :param writes: numbers the guest's writes.
    """

    def __init__(
        self, world: World, node: str, instance: str, volume: Volume, writes: Callable[[], int]
    ) -> None:
        self.world, self.node, self.instance, self.volume = world, node, instance, volume
        self.run = f"run-{world.number()}"
        self.is_alive = True
        self.status = "inmigrate"
        self.migration = ""
        self.mirror_is_ready = False
        self.mirror_to: Qemu | None = None
        self.peer: Qemu | None = None
        self._writes = writes

    # The guest.

    def resume(self) -> None:
        """``cont``; or the guest's start."""
        if self.is_alive and self.status != "running":
            self.status = "running"
            self.world.tell(EventKind.RESUME, self.instance, self.node)
            self._write_later()

    def stop(self, status: str) -> None:
        if self.status == "running":
            self.world.tell(EventKind.STOP, self.instance, self.node)
        self.status = status

    def kill(self) -> None:
        """It ends; a QEMU that waits for its guest ends too. Its peer sees a broken connection."""
        if self.is_alive:
            self.stop("")
            self.is_alive = False
            if self.peer and self.peer.status == "inmigrate":
                self.world.later(0.05, self.peer._exit)

    def _exit(self) -> None:
        if self.status == "inmigrate":
            self.kill()

    def _write_later(self) -> None:
        self.world.later(self.world.between(0.2, 1.0), self._write)

    def _write(self) -> None:
        """The guest writes and flushes, and has the acknowledgement. A mirror that blocks writes
        has it at the other end before, in that host's memory."""
        if not self.is_alive or self.status != "running":
            return
        number = self._writes()
        if self.mirror_to:
            if self._reaches(self.mirror_to) and self.mirror_to.volume.is_open:
                self.mirror_to.volume.cached.add(number)
            else:
                self.end_mirror()
        self.volume.write(number)
        self.world.tell(EventKind.WRITE, self.instance, self.node, str(number))
        self._write_later()

    def _reaches(self, other: Qemu | None) -> bool:
        return bool(other and other.is_alive and self.world.connected(self.node, other.node))

    # Mirrors.

    def begin_mirror(self, target: Qemu | None) -> bool:
        """Returns False if the other QEMU can't be reached."""
        if not self._reaches(target):
            return False
        self.mirror_to, self.mirror_is_ready = target, False
        self.world.later(self.world.between(0.5, 2), self._mirrored, target, label="mirror")
        return True

    def _mirrored(self, target: Qemu) -> None:
        if self.mirror_to is target and self.is_alive:
            if self._reaches(target) and target.volume.fill(self.volume.cached):
                self.mirror_is_ready = True
            else:
                self.end_mirror()

    def end_mirror(self) -> None:
        self.mirror_to, self.mirror_is_ready = None, False

    # Migration.

    def send(self, peer: Qemu | None) -> None:
        """``migrate``, with pause-before-switchover and return-path."""
        self.migration = "active"
        self.peer = peer
        self.world.later(self.world.between(0.3, 1.5), self._switchover, label="pre-switchover")

    def _switchover(self) -> None:
        if self.is_alive and self.migration == "active":
            if self._receives():
                self.stop("finish-migrate")
                self.migration = "pre-switchover"
            else:
                self._fail()

    def go_on(self) -> None:
        """``migrate-continue``."""
        if self.is_alive and self.migration == "pre-switchover":
            self.migration = "device"
            self.world.later(self.world.between(0.02, 0.2), self._received, label="device")

    def _received(self) -> None:
        if not self.is_alive:
            return
        if self._receives() and self.peer:
            self.peer.status = "paused"
            self.world.later(self.world.between(0.01, 0.1), self._completed, label="completed")
        else:
            self._fail()

    def _completed(self) -> None:
        if self.is_alive and self.migration == "device":
            if self._reaches(self.peer):
                self.migration, self.status = "completed", "postmigrate"
            else:  # the target may have all, but its word is lost on the return path
                self._fail()

    def _receives(self) -> bool:
        peer = self.peer
        return self._reaches(peer) and peer is not None and peer.status == "inmigrate"

    def _fail(self) -> None:
        """The migration fails, and the guest runs on by itself."""
        self._end_migration("failed")

    def _end_migration(self, status: str) -> None:
        self.migration = status
        if self.status == "finish-migrate":
            self.resume()
        if self.peer and self.peer.status == "inmigrate":
            self.world.later(0.05, self.peer._exit)

    def cancel(self) -> None:
        """``migrate_cancel``."""
        if self.migration in ("active", "pre-switchover"):
            self._end_migration("cancelled")
