"""What a guest's UEFI stores: a file an instance, made from a template, kept for the next start."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from brine.common import paths
from brine.common.regular_file import read_regular
from brine.common.wholefile import write_whole
from brine.instance.control import uefi_variables_of
from brine.instance.spec_files import InstanceError

_MODE = 0o600


@contextlib.contextmanager
def opened(name: str, template: Path) -> Iterator[int]:
    """Open an instance's variables, for the time of the block, as a descriptor to read and write.

    :param template: what they are where there are none yet.
    :raises InstanceError: if they can't be made or opened, or are not of the template's size: they
        are of another firmware, which the guest's would not start with.
    """
    file = uefi_variables_of(name)
    try:
        if not file.exists():
            paths.UEFI_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(file, read_regular(template), mode=_MODE, alone=True)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(file, flags)
        size = template.stat().st_size
    except OSError as error:
        text = f"{error.filename or file}: can't be used: {error.strerror}"
        raise InstanceError(name, text) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise InstanceError(
                name,
                f"{file}: holds no variables of this firmware, which has {size} bytes of them",
                hint=f"move {file} away, and the next start makes new ones from {template}",
            )
        yield descriptor
    finally:
        os.close(descriptor)


def copy(name: str, other: str) -> None:
    """Give another instance what one's firmware has stored, such as what it boots, if there is any.

    :raises InstanceError: if that fails.
    """
    try:
        write_whole(
            uefi_variables_of(other), read_regular(uefi_variables_of(name)), mode=_MODE, alone=True
        )
    except FileNotFoundError:
        return
    except OSError as error:
        text = f"{uefi_variables_of(name)}: can't be copied: {error.strerror}"
        raise InstanceError(other, text) from error
