"""The lock of a configuration's one writer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from brine.common import paths
from brine.common.config.objects import ConfigError
from brine.common.locks import locked


@contextlib.contextmanager
def write_lock(file: Path, timeout_s: float) -> Iterator[None]:
    """Be the one writer for the time of the block.

    :param file: the lock's.
    :raises brine.common.locks.LockedError: if another process is, for *timeout_s*.
    :raises ConfigError: if this one can't be.
    """
    with contextlib.ExitStack() as stack:
        try:
            if file == paths.CONFIG_LOCK:
                file.parent.mkdir(mode=0o755, exist_ok=True)
            stack.enter_context(locked(file, timeout_s=timeout_s))
        except PermissionError as error:
            text = f"{file}: this user may not change the configuration"
            raise ConfigError(text, hint="be root") from error
        except OSError as error:
            raise ConfigError(f"{file}: can't be locked: {error.strerror}") from error
        yield
