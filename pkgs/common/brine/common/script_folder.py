"""Folders of operators' own programs, such as ``/etc/brine/nic.d``: which of them may be run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from brine.common.errors import BrineError
from brine.common.files import fault_of_writers

# As run-parts(8): backup files of editors and packages have a dot or a tilde in their names.
_NAME = re.compile(r"[A-Za-z0-9_-]+")


class FoundProgram(NamedTuple):
    """A program in a folder.

    :param fault: why it must not be run; empty if it may be.
    """

    path: Path
    fault: str = ""


def programs_in(folder: Path) -> Iterator[FoundProgram]:
    """The programs in a folder, in the order of their names; none if it is missing. One that users
    other than root may write must not be run, whoever it would run as.

    :raises BrineError: if the folder can't be read.
    """
    try:
        files = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise BrineError(f"{folder}: can't be read: {error.strerror}") from error
    usable = [file for file in files if _NAME.fullmatch(file.name) and file.is_file()]
    usable = [file for file in usable if os.access(file, os.X_OK)]
    if usable and (fault := fault_of_writers(folder)):
        yield FoundProgram(folder, fault)
        return
    for file in usable:
        yield FoundProgram(file, fault_of_writers(file) or "")
