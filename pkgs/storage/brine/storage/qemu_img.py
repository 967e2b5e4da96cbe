"""``qemu-img``: images are made, resized, copied and merged by QEMU's own program.

Source: :manpage:`qemu-img(1)`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from brine.common.errors import install_hint, printable
from brine.common.process import ENDING_WITH_US, run_bounded
from brine.common.progress import Tell, tell_nothing
from brine.storage.unit import StorageError
from brine.vm.disk import Backing, Disk

_PROGRAM = "qemu-img"
_TIMEOUT_S = 120.0
_ENVIRONMENT = {"PATH": "/usr/bin:/bin:/usr/local/bin", "LC_ALL": "C"}
_EXTERNAL_DATA = 1 << 2  # of the incompatible features
_PROGRESS = re.compile(rb"\(([\d.]+)/100%\)")


def run(*arguments: str) -> None:
    """Run a command that is done at once.

    :raises StorageError: if it fails.
    """
    command = f"{_PROGRAM} {arguments[0]}"
    try:
        done = run_bounded([_program(), *arguments], timeout_s=_TIMEOUT_S, environment=_ENVIRONMENT)
    except TimeoutError:
        raise StorageError(f"{command}: no end within {_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise StorageError(f"{command}: {_fault(done.stderr)}")


def run_long(*arguments: str, tell: Tell = tell_nothing, text: str = "") -> None:
    """Run a command that moves data and tells its progress, such as ``convert -p``. It ends with
    this process.

    :param text: what is done, for *tell*.
    :raises StorageError: if it fails.
    """
    # It would keep the images open that a settled operation removes.
    command = [*ENDING_WITH_US, _program(), arguments[0], "-p", *arguments[1:]]
    program = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_ENVIRONMENT,
    )
    assert program.stdout
    assert program.stderr
    try:
        while said := os.read(program.stdout.fileno(), 4096):
            if found := _PROGRESS.findall(said):
                tell(float(found[-1]) / 100, text)
        fault = program.stderr.read().decode(errors="replace")
        status = program.wait()
    except BaseException:
        program.kill()
        program.wait()
        raise
    if status:
        raise StorageError(f"{_PROGRAM} {arguments[0]}: {_fault(fault)}")


def location_of(disk: Disk) -> str:
    """How qemu-img opens a disk: with the backing files that Brine knows, and no others.

    :raises StorageError: if an image names another file.
    """
    chain = [Backing(path=disk.path, format=disk.format), *disk.layers()]
    node: dict[str, Any] | None = None
    for layer in reversed(chain):
        if layer.format == "qcow2":
            refuse_external_data(layer.path)
        kind = "host_device" if Path(layer.path).is_block_device() else "file"
        below = {"backing": node} if layer.format == "qcow2" else {}
        node = {"driver": layer.format, "file": {"driver": kind, "filename": layer.path}, **below}
    return f"json:{json.dumps(node)}"


def refuse_external_data(path: str) -> None:
    """Refuse an image whose header names another file for its data: a guest that breaks out of its
    QEMU can write that header. Source: QEMU's docs/interop/qcow2.rst.

    :raises StorageError: if it does, or can't be read.
    """
    try:
        with open(path, "rb") as file:
            header = file.read(80)
    except OSError as error:
        raise StorageError(f"{path}: can't be read: {error.strerror}") from error
    is_newer = int.from_bytes(header[4:8], "big") >= 3
    if is_newer and int.from_bytes(header[72:80], "big") & _EXTERNAL_DATA:
        raise StorageError(f"{path}: has an external data file, which Brine does not follow")


def _fault(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return printable(lines[-1].removeprefix(f"{_PROGRAM}: ")) if lines else "it failed"


def _program() -> str:
    if found := shutil.which(_PROGRAM, path=_ENVIRONMENT["PATH"]):
        return found
    hint = install_hint(apt="qemu-utils", dnf="qemu-img")
    raise StorageError(f"{_PROGRAM} is not installed", hint=hint)
