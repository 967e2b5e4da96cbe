"""Files that are not what a writer of ours left: kept aside before another takes their place."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from brine.common.config.shape import ConfigError
from brine.common.config.versions import second_name


class Aside(Enum):
    """Why a file is kept aside; its name there has it."""

    CORRUPT = "corrupt"
    OLDER = "older"


def keep_aside(file: Path, why: Aside, *, now: float, group: int | None, prefix: str) -> Path:
    """Give *file* a second name beside its own, as ``config.data.corrupt-TIME``.

    :param now: seconds since 1970.
    :param group: id of the group that may read it.
    :param prefix: what the name of an unfinished copy begins with.
    :return: the second name.
    :raises ConfigError: if that fails.
    """
    time = datetime.fromtimestamp(now, UTC)
    first = f"{file.name}.{why.value}-{time:%Y%m%dT%H%M%SZ}"
    for number in itertools.count(1):
        aside = file.with_name(first if number == 1 else f"{first}-{number}")
        try:
            second_name(file, aside, group, prefix=prefix)
        except FileExistsError:  # another one of this very second
            if not aside.samefile(file):
                continue
        except OSError as error:
            text = f"{file}: can't be kept aside: {error.strerror}"
            raise ConfigError(text, hint="nothing was changed") from error
        break
    return aside
