"""Ways to end a real guest, and the verdict of Brine's KVM daemon that is right for each."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lab.guest import Guest


@dataclass(frozen=True)
class GuestEnding:
    """A way to end a guest.

    :param act: begins it, on a guest that is ready.
    :param verdict: the right one: who, and the cause.
    :param options: for :func:`lab.guest.start_guest`.
    """

    act: Callable[[Guest], None]
    verdict: tuple[str, str]
    options: dict[str, Any] = field(default_factory=dict)


def _say_stopping(guest: Guest) -> None:
    """Leave the file by which an admin's tool says that the guest is being stopped."""
    guest.kvmd_socket.with_suffix(".stopping").touch()


def _stop_by_admin(guest: Guest) -> None:
    _say_stopping(guest)
    guest.powerdown()


def _kill_by_admin(guest: Guest) -> None:
    _say_stopping(guest)
    guest.signal(signal.SIGKILL)


def _pause_and_poweroff(guest: Guest) -> None:
    guest.qmp("stop")
    guest.qmp("cont")
    guest.order("poweroff")


def _pause_and(number: signal.Signals) -> Callable[[Guest], None]:
    def act(guest: Guest) -> None:
        guest.qmp("stop")
        guest.signal(number)

    return act


def _reboot_and_poweroff(guest: Guest) -> None:
    guest.order("reboot")
    guest.wait_ready()
    guest.order("poweroff")


ENDINGS = {
    "poweroff": GuestEnding(lambda guest: guest.order("poweroff"), ("user", "guest-shutdown")),
    "stopping": GuestEnding(_stop_by_admin, ("admin", "stopping")),
    "stopping-kill": GuestEnding(_kill_by_admin, ("admin", "stopping")),
    "term": GuestEnding(lambda guest: guest.signal(signal.SIGTERM), ("admin", "host-signal")),
    "int": GuestEnding(lambda guest: guest.signal(signal.SIGINT), ("admin", "host-signal")),
    "kill": GuestEnding(lambda guest: guest.signal(signal.SIGKILL), ("crash", "eof")),
    "quit": GuestEnding(lambda guest: guest.qmp("quit"), ("admin", "host-qmp-quit")),
    "powerdown": GuestEnding(lambda guest: guest.powerdown(), ("admin", "powerdown")),
    "pause-poweroff": GuestEnding(_pause_and_poweroff, ("user", "guest-shutdown")),
    "pause-term": GuestEnding(_pause_and(signal.SIGTERM), ("admin", "host-signal")),
    "pause-kill": GuestEnding(_pause_and(signal.SIGKILL), ("admin", "paused")),
    "reboot-poweroff": GuestEnding(_reboot_and_poweroff, ("user", "guest-shutdown")),
    "no-reboot": GuestEnding(
        lambda guest: guest.order("reboot"), ("crash", "guest-reset"), {"no_reboot": True}
    ),
    "reset": GuestEnding(
        lambda guest: guest.qmp("system_reset"),
        ("admin", "host-qmp-system-reset"),
        {"no_reboot": True},
    ),
    "panic": GuestEnding(
        lambda guest: guest.order("crash"),
        ("crash", "guest-panic"),
        {"panic_device": True, "no_reboot": True},
    ),
    "panic-unseen": GuestEnding(
        lambda guest: guest.order("crash"), ("crash", "guest-reset"), {"no_reboot": True}
    ),
}
