"""What the unit runs beside QEMU at its start: the unit counts as started when QEMU answers."""

from __future__ import annotations

import sys
import time

from brine.common.errors import BrineError, die
from brine.common.qmp_blocking import BlockingQmpClient
from brine.common.qmp_errors import QmpClosedError, QmpTimeoutError
from brine.instance import spec_files
from brine.instance.control import control_of
from brine.instance.process import Process, main_pid
from brine.instance.spec import Spec
from brine.instance.spec_files import InstanceError
from brine.instance.unit import unit_of
from brine.instance.vnc import set_password

TIMEOUT_S = 90.0
"""Memory in huge pages may take that long to be had."""

_PROGRAM = "brine-instance"
_ANSWER_S = 5.0
_PAUSE_S = 0.02


def main() -> None:
    """Wait for the QEMU of the instance that is named on the command line."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    try:
        spec = spec_files.load(name)
        with Process.of(main_pid(), unit=unit_of(name)) as qemu:
            wait_ready(spec, qemu)
    except BrineError as error:
        die(_PROGRAM, error, 1)


def wait_ready(spec: Spec, qemu: Process | None, *, timeout_s: float = TIMEOUT_S) -> None:
    """Return when QEMU answers, and has what it is told after its start.

    :raises InstanceError: if it has ended, or does not answer in time.
    :raises BrineError: if it refuses what it is told.
    """
    deadline = time.monotonic() + timeout_s
    path = control_of(spec.name).qmp
    while True:
        if qemu is None or qemu.ended():
            raise InstanceError(spec.name, "QEMU has ended; see what it said above")
        try:
            with BlockingQmpClient.connect(path, timeout_s=_ANSWER_S) as qmp:
                set_password(qmp, spec)
            return
        except (QmpClosedError, QmpTimeoutError) as error:
            if time.monotonic() >= deadline:
                raise InstanceError(spec.name, f"QEMU does not answer: {error}") from error
        qemu.ended(_PAUSE_S)


if __name__ == "__main__":
    main()
