"""Runtime files that could not be used, and are kept under other names for people to look at."""

from __future__ import annotations

import os
import re
from pathlib import Path

from brine.common import paths
from brine.common.aside import put_aside
from brine.instance.spec_files import InstanceError


def runtime_file_of(name: str) -> Path:
    """Where the runtime file of an instance is."""
    return paths.RUNTIME_DIR / f"{name}.json"


def asides_of(name: str) -> frozenset[Path]:
    """Those that are kept of an instance."""
    try:
        files = os.listdir(paths.RUNTIME_DIR)
    except OSError:
        return frozenset()
    ours = re.compile(rf"{re.escape(name)}\.aside(-\d+)?")
    return frozenset(paths.RUNTIME_DIR / one for one in files if ours.fullmatch(one))


def keep_aside(name: str) -> Path:
    """Give a runtime file a name that nothing else has, and return it.

    :raises InstanceError: if that fails.
    """
    file = runtime_file_of(name)
    aside = file.with_name(f"{name}.aside")
    try:
        return put_aside(file, aside)
    except OSError as error:
        text = f"{file}: can't be kept aside: {error.strerror}"
        are_many = isinstance(error, FileExistsError)
        hint = f"remove those that nobody needs: {aside}*" if are_many else None
        raise InstanceError(name, text, hint=hint) from error
