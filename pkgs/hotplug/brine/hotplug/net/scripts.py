"""Operators' own scripts, run around a NIC's wiring: see :manpage:`brine-nic.d(5)`.

The environment is Ganeti's, so a script written for its ``kvm-vif-bridge`` works here.
"""

from __future__ import annotations

import enum
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError, printable
from brine.common.script_folder import programs_in

TIMEOUT_S = 30.0
"""Of each script."""

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MOST_OUTPUT_BYTES = 64 * 1024

log = logging.getLogger(__name__)


class Phase(enum.StrEnum):
    """When scripts are called; its value is their argument."""

    PRE_UP = "pre-up"
    UP = "up"
    PRE_DOWN = "pre-down"
    DOWN = "down"


class ScriptError(BrineError):
    def __init__(self, script: Path, phase: Phase, message: str) -> None:
        hint = "its output is in the journal: journalctl -t brine"
        super().__init__(f"{script} {phase}: {message}", hint=hint)


def run_scripts(phase: Phase, environment: Mapping[str, str]) -> None:
    """Run the scripts, in the order of their names, each with *phase* as its argument.

    :param environment: their environment, beside ``PATH`` and ``LANG``.
    :raises ScriptError: if one fails; later scripts are not run.
    """
    for script in scripts():
        _run(script, phase, environment)


def scripts() -> list[Path]:
    """The scripts that may be run.

    They run as root. A script that users other than root may write is left out, with a warning.
    """
    folder = paths.NIC_SCRIPTS_DIR
    trusted = []
    for script, fault in programs_in(folder):
        if not fault:
            trusted.append(script)
        elif script == folder:
            log.warning("%s: no script in it is run: %s", folder, fault)
        else:
            log.warning("%s is not run: %s", script, fault)
    return trusted


def _run(script: Path, phase: Phase, environment: Mapping[str, str]) -> None:
    import subprocess  # both take long to load, and most nodes have no script
    import tempfile

    # A file, not a pipe: a process that a script leaves behind would hold a pipe open.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                [script, phase.value],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env={"PATH": SEARCH_PATH, "LANG": "C.UTF-8", **environment},
                start_new_session=True,
            )
        except OSError as error:
            raise ScriptError(script, phase, f"can't be run: {error.strerror}") from error
        try:
            status = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ScriptError(script, phase, f"took longer than {TIMEOUT_S:g} s") from None
        finally:
            if process.poll() is None:
                # Its whole process group.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            said = os.pread(output.fileno(), _MOST_OUTPUT_BYTES, 0).decode(errors="replace")
            lines = [printable(line) for line in said.splitlines() if line.strip()]
            fields = {"BRINE_INSTANCE": environment.get("INSTANCE", "")}
            fields["BRINE_SCRIPT"] = str(script)
            for line in lines:
                log.info("%s %s: %s", script, phase, line, extra={"fields": fields})
    if status != 0:
        how = f"ended by signal {-status}" if status < 0 else f"failed with status {status}"
        raise ScriptError(script, phase, ": ".join([how, *lines[-1:]]))
