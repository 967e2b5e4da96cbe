"""How plugging a device fails."""

from __future__ import annotations

from brine.common.errors import BrineError


class HotplugError(BrineError):
    """A device that could not be plugged or unplugged."""


class RefusedByGuestError(HotplugError):
    """The guest did not give a device up; it is still plugged in whole.

    :param device_id: QEMU's.
    :param reason: what the guest did, or did not.
    """

    def __init__(self, device_id: str, reason: str) -> None:
        super().__init__(
            f"{device_id}: refused by the guest: {reason}; it is still plugged in",
            hint="a guest that boots, is paused or can't hotplug keeps it; try again later",
        )
        self.device_id = device_id
        self.reason = reason
