"""Runs with markers, and observed instances with such runs, for tests that read no files."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from brine.instance.observe import Observed
from brine.instance.unit import Unit
from brine.instance.xen.xl import Domain
from brine.vm.markers import UNKNOWN_RUN, Marker, MarkerKind
from brine.vm.run import Run
from brine.vm.spec import Spec


def marked_run(
    *kinds: MarkerKind,
    run: str = UNKNOWN_RUN,
    held: Container[MarkerKind] = (),
    made_at: float = 0.0,
    **facts: Any,
) -> Run:
    """A run with markers of these kinds, all as old and with the same facts, and no others."""
    markers = [Marker(kind, "web1", run, made_at, facts) for kind in kinds]
    return Run.with_markers("web1", run, *markers, held=held)


def observed(
    spec: Spec,
    unit: Unit | None = None,
    domain: Domain | None = None,
    *,
    marks: tuple[MarkerKind, ...] = (),
    held: Container[MarkerKind] = (),
    run: str = UNKNOWN_RUN,
    **others: Any,
) -> Observed:
    """An observed instance whose last run has these markers."""
    return Observed(spec, unit, domain, run=marked_run(*marks, run=run, held=held), **others)
