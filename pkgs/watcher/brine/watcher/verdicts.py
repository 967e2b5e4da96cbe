"""Who ended an instance, as kvmd has said: asked of its public command."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from datetime import datetime

from brine.common.errors import BrineError

_TIMEOUT_S = 60


class VerdictsError(BrineError):
    """kvmd's verdicts can't be had."""


def last_verdicts(since: Mapping[str, float]) -> dict[str, str]:
    """The verdict on each instance's last end: ``user``, ``admin`` or ``crash``.

    :param since: of these instances, from when on each, in seconds since 1970. One that has no
        verdict since then is left out.
    :raises VerdictsError: if they can't be had.
    """
    if not since:
        return {}
    first = datetime.fromtimestamp(min(since.values())).astimezone().isoformat()
    command = ["brine", "kvmd", "verdicts", "--json", "--since", first, "--", *since]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            said = done.stderr.strip().partition("\n")[0]
            raise VerdictsError(f"brine kvmd verdicts: {said or done.returncode}")
        lines = json.loads(done.stdout)
        given = [(line["instance"], line["verdict"], _time(line["time"])) for line in lines]
    except subprocess.TimeoutExpired:
        raise VerdictsError(f"brine kvmd verdicts: no answer for {_TIMEOUT_S} s") from None
    except OSError as error:
        raise VerdictsError(f"brine kvmd verdicts: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise VerdictsError(f"brine kvmd verdicts: not understood: {error}") from error
    return {name: who for name, who, time in given if time >= since.get(name, time + 1)}


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
