"""The domain of an instance from now to its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from brine.common.instance_units import unit_of
from brine.instance.process import Process
from brine.instance.xen import xl
from brine.instance.xen.domains import Domain
from brine.instance.xen.xl import XlError

_LOOK_AGAIN_S = 1.0
_HEARD_AT_LEAST_S = 1.0
_NOTICED_S = 30.0
_DESTROY_AGAIN_S = 1.0


class Guest:
    """The domain of an instance. When its guest reboots, it goes on as another one.

    :param uuid: of the domain.
    :param waiter: the xl that waits for its end; None if it was killed.
    """

    def __init__(self, uuid: str, waiter: Process | None) -> None:
        self._uuid = uuid
        self._waiter = waiter

    @classmethod
    @contextlib.contextmanager
    def of(cls, name: str, uuid: str, pid: int) -> Iterator[Guest]:
        """The domain of an instance.

        :param pid: of the main process of its unit; 0 if there is none.
        """
        with Process.of(pid, unit=unit_of(name)) as waiter:
            yield cls(uuid, waiter)

    def ended(self, timeout_s: float = 0) -> bool:
        """Whether it has ended, or does within so many seconds. What is left of it does not count.

        :raises XlError: if that can't be known.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0)
            if self._waiter is None:
                if not self._lives():
                    return True
                time.sleep(min(left_s, _LOOK_AGAIN_S))
            elif self._waiter.ended(left_s):
                self._waiter = None  # its domain has ended, or it was killed
                continue
            if time.monotonic() >= deadline:
                return False

    def ask(self, timeout_s: float) -> str | None:
        """Have its guest be told to shut down; returns why it was not, or None if it was.

        :param timeout_s: how long the guest may take to say that it has heard it.
        """
        try:
            domain = xl.domain_of(self._uuid)
            if domain is None or not domain.lives():
                return "its domain is not there just now"
            if domain.has("p"):
                xl.unpause(domain.number)  # it would hear nothing
            xl.shut_down(domain.number, timeout_s=max(timeout_s, _HEARD_AT_LEAST_S))
        except XlError as error:
            return str(error)
        return None

    def destroy(self) -> bool:
        """End it, whatever it does; returns whether it has ended then.

        A guest that reboots just then goes on as another domain, which is ended, too.

        :raises XlError: if Xen refuses, or can't be asked.
        """
        deadline = time.monotonic() + _NOTICED_S
        while True:
            fault = self._destroy()
            left_s = max(deadline - time.monotonic(), 0)
            # Its xl has to see that it is gone.
            if self.ended(min(left_s, _DESTROY_AGAIN_S)):
                return True
            if time.monotonic() >= deadline:
                if fault:
                    raise fault
                return False

    def _destroy(self) -> XlError | None:
        """Destroy what there is of it now; returns why that failed, if it did."""
        try:
            domain = xl.domain_of(self._uuid)
            if domain and not domain.is_dying():
                xl.destroy(domain)
        except XlError as error:
            return error
        return None

    def _lives(self) -> bool:
        domain: Domain | None = xl.domain_of(self._uuid)
        return domain is not None and domain.lives()
