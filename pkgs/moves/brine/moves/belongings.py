"""What comes along with an instance beside its spec and its disks: UEFI variables, the end of its
console log, and the password of VNC.

All of it may be secret. So the offer, which Salt carries, only lists it, and the source sends it to
the target itself, sealed: before the guest's memory, or once the guest is off. What is kept twice
is as if it was kept once.
"""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from brine.common.files import read_regular, write_whole
from brine.instance.kvm.resources import LONGEST_PASSWORD
from brine.instance.store import telling
from brine.moves.migration import MoveError
from brine.vm.files import InstanceFiles
from brine.vm.spec import UEFI, Spec

LARGEST = 8 << 20
"""In bytes: QEMU has no larger firmware."""

_LOG_BYTES = 64 * 1024
_MODE = 0o600
_LOG_MODE = 0o640


class Belonging(StrEnum):
    """The kinds of what comes along."""

    UEFI_VARIABLES = "uefi_vars"
    CONSOLE_LOG = "console_log"
    VNC_PASSWORD = "vnc_password"


Belongings = Mapping[Belonging, bytes]
"""What an instance has of each kind."""


def belongings_of(spec: Spec) -> Belongings:
    """What an instance of this node has.

    :raises MoveError: what can't be read.
    """
    found = {}
    for kind, file in _files(spec):
        try:
            data = read_regular(file)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise MoveError(f"{file}: {error.strerror}") from error
        if kind is Belonging.CONSOLE_LOG:
            data = data[-_LOG_BYTES:]
        if kind is Belonging.VNC_PASSWORD:
            data = data.partition(b"\n")[0].rstrip(b"\r")
            _refuse_odd_password(data or b"-")
        if len(data) > LARGEST:
            raise MoveError(f"{file}: has {len(data)} bytes, and {LARGEST} at most come along")
        if data:
            found[kind] = data
    return found


def _files(spec: Spec) -> Iterator[tuple[Belonging, Path]]:
    files = InstanceFiles(spec.name)
    if spec.firmware == UEFI:
        yield Belonging.UEFI_VARIABLES, files.uefi_variables
    yield Belonging.CONSOLE_LOG, files.console_log
    if spec.vnc_password_file:
        yield Belonging.VNC_PASSWORD, Path(spec.vnc_password_file)


def to_message(found: Belongings) -> dict[str, str]:
    """It as the source sends it."""
    return {kind.value: base64.b64encode(data).decode() for kind, data in found.items()}


def of_message(data: Any) -> Belongings:
    """What the source has sent.

    :raises MoveError: if it can't be what an instance has.
    """
    try:
        found = {
            Belonging(kind): base64.b64decode(text, validate=True) for kind, text in data.items()
        }
    except (AttributeError, TypeError, ValueError):  # whose text may be what must not be told
        raise MoveError("what comes along can't be read") from None
    if any(len(one) > LARGEST for one in found.values()):
        raise MoveError(f"what comes along has more than {LARGEST} bytes")
    if Belonging.VNC_PASSWORD in found:
        _refuse_odd_password(found[Belonging.VNC_PASSWORD])
    return found


def _refuse_odd_password(password: bytes) -> None:
    text = password.decode(errors="replace")
    is_odd = not text.isprintable() or text.encode() != password
    if is_odd or not 0 < len(password) <= LONGEST_PASSWORD:
        raise MoveError(f"a VNC password is a line of 1 to {LONGEST_PASSWORD} bytes")


def keep_password_place(spec: Spec) -> None:
    """Have a password of VNC that no one knows, until that of the guest comes: without any, no
    QEMU starts that waits for it."""
    _write(spec.name, Path(spec.vnc_password_file), secrets.token_urlsafe(6).encode() + b"\n")


def keep_belongings(spec: Spec, found: Belongings, *, makes_password: bool) -> None:
    """Write what has come along to this node's files, durably.

    :param makes_password: whether this node has no other file with the password of VNC.
    """
    files = InstanceFiles(spec.name)
    if variables := found.get(Belonging.UEFI_VARIABLES):
        _keep_variables(spec.name, files.uefi_variables, variables)
    if log := found.get(Belonging.CONSOLE_LOG):
        _keep_log(spec.name, files.console_log, log)
    if makes_password and (password := found.get(Belonging.VNC_PASSWORD)):
        _write(spec.name, Path(spec.vnc_password_file), password + b"\n")


def _keep_variables(name: str, file: Path, data: bytes) -> None:
    """A QEMU that waits for its guest has the file open, and so it stays the same file."""
    if not file.exists():
        _write(name, file, data)
        return
    with telling(name, f"{file}: can't be written"):
        descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(data)
            opened.truncate()
            opened.flush()
            os.fsync(descriptor)


def _keep_log(name: str, file: Path, data: bytes) -> None:
    """A QEMU that waits for its guest has said already that it has been started."""
    with telling(name, f"{file}: can't be read"):
        said = read_regular(file) if file.exists() else b""
    if not said.startswith(data):
        _write(name, file, data + said, mode=_LOG_MODE)


def _write(name: str, file: Path, data: bytes, *, mode: int = _MODE) -> None:
    with telling(name, f"{file}: can't be written"):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(file, data, mode=mode, alone=True)
