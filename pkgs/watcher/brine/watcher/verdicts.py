"""Who ended an instance, as kvmd has told the journal."""

from __future__ import annotations

from collections.abc import Mapping

from brine.common.errors import BrineError


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
    from brine.instance import journal  # takes long to load, and mostly nobody asks

    try:
        return {name: verdict.who for name, verdict in journal.last_verdicts(since).items()}
    except OSError as error:
        raise VerdictsError(f"the journal can't be read: {error.strerror}") from error
