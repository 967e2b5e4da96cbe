"""What passes have done since the node's boot, and when the last one was: for ``brine metrics``."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from brine.common import paths
from brine.common.figures import Figures, earlier_figures, rows_of, write_figures
from brine.common.locks import LockedError, locked
from brine.watcher.decide import STARTS
from brine.watcher.passes import PassOutcome

log = logging.getLogger(__name__)

FILE = paths.WATCHER_FIGURES_FILE
_LOCK_S = 5.0


class PassResult(StrEnum):
    """``ODD``: something needs an administrator's attention."""

    OK = "ok"
    ODD = "odd"
    FAILED = "failed"


@dataclass
class PassCounts:
    """What was done since the boot: restarts by instance and whether they failed, other actions,
    and passes by result."""

    restarts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    actions: Counter[tuple[str, ...]] = field(default_factory=Counter)
    passes: Counter[tuple[str, ...]] = field(default_factory=Counter)

    @classmethod
    def of(cls, earlier: Figures | None) -> PassCounts:
        if earlier is None:
            return cls()
        restarts, actions = earlier.counts("restarts", 2), earlier.counts("actions", 1)
        return cls(restarts, actions, earlier.counts("passes", 1))

    def add(self, outcomes: Iterable[PassOutcome], result: PassResult) -> None:
        """Count a pass."""
        for one in outcomes:
            for action in one.actions:
                self.actions[(str(action),)] += 1
                if action in STARTS:
                    self.restarts[(one.name, "failed" if one.fault else "done")] += 1
        self.passes[(str(result),)] += 1

    def forget_others(self, names: Iterable[str]) -> None:
        """Forget instances that are not among these."""
        known = set(names)
        for kind in [kind for kind in self.restarts if kind[0] not in known]:
            del self.restarts[kind]


def note_pass(
    outcomes: Iterable[PassOutcome],
    result: PassResult,
    *,
    took_s: float,
    names: Iterable[str] | None,
) -> None:
    """Count a pass. That it can't be counted is logged, and no fault of the pass.

    :param names: of all instances; None if the pass was only about some that had ended.
    """
    try:
        with locked(paths.LOCK_DIR / "watcher-figures.lock", timeout_s=_LOCK_S):
            earlier = earlier_figures(FILE)
            counts = PassCounts.of(earlier)
            counts.add(outcomes, result)
            last = {key: earlier.number(key) for key in ("last", "took_s")} if earlier else {}
            if names is not None:
                counts.forget_others(names)
                last = {"last": time.time(), "took_s": round(took_s, 3)}
            rows = {key: rows_of(getattr(counts, key)) for key in ("restarts", "actions", "passes")}
            write_figures(FILE, {**last, **rows})
    except (LockedError, OSError) as error:
        log.warning("%s: this pass is not counted: %s", FILE, error)
