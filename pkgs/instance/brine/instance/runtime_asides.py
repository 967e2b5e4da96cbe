"""Runtime files that could not be used, and are kept under other names for people to look at."""

from __future__ import annotations

import os
from pathlib import Path

from brine.common import paths
from brine.instance.spec_files import InstanceError

_MOST = 100


def runtime_file_of(name: str) -> Path:
    """Where the runtime file of an instance is."""
    return paths.RUNTIME_DIR / f"{name}.json"


def asides_of(name: str) -> frozenset[Path]:
    """Those that are kept of an instance."""
    start = f"{name}.aside"
    try:
        files = os.listdir(paths.RUNTIME_DIR)
    except OSError:
        return frozenset()
    ours = [one for one in files if one.startswith(start) and one.removeprefix(start).isdecimal()]
    return frozenset(paths.RUNTIME_DIR / one for one in ours)


def keep_aside(name: str) -> Path:
    """Give a runtime file a name that nothing else has, and return it.

    :raises InstanceError: if that fails.
    """
    file = runtime_file_of(name)
    for number in range(1, _MOST):
        aside = file.with_name(f"{name}.aside{number}")
        try:
            os.link(file, aside, follow_symlinks=False)
            file.unlink()
        except FileExistsError:
            continue
        except OSError as error:
            text = f"{file}: can't be kept aside: {error.strerror}"
            raise InstanceError(name, text) from error
        return aside
    hint = f"remove those that nobody needs: {file.with_name(name)}.aside*"
    raise InstanceError(name, f"{file}: can't be kept aside: too many are", hint=hint)
