"""Figures in the OpenMetrics text format, and the parts' own, which ``brine metrics`` prints.

A part tells its figures by an entry point of the group ``brine.metrics``: a function without
arguments that returns :class:`Metric` objects. A part that is not installed has none, so what it
would tell is absent, and not zero.

Only gauges, counters and summaries without quantiles, and no time stamps: node_exporter's textfile
collector reads the older text format, and these look the same in both.

Source: the OpenMetrics specification, "Text format".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from brine.common.entry_points import entry_points
from brine.common.errors import BrineError

PREFIX = "brine_"
CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_GROUP = "brine.metrics"
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
_END = "# EOF\n"

Labels = Mapping[str, str]


class MetricType(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    SUMMARY = "summary"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric with its samples; without any it is not printed.

    :param name: without the prefix and the unit, and of a counter without ``_total``.
    :param samples: what follows the metric's name (``_total``, ``_sum``), labels, and the value.
    :param unit: in the plural, such as ``seconds``; empty is a number of things.
    """

    type: MetricType
    name: str
    about: str
    samples: tuple[tuple[str, Labels, float], ...]
    unit: str = ""

    @property
    def full_name(self) -> str:
        return f"{PREFIX}{self.name}_{self.unit}" if self.unit else f"{PREFIX}{self.name}"

    def lines(self) -> Iterator[str]:
        """It in the text format."""
        if not self.samples:
            return
        name = self.full_name
        yield f"# TYPE {name} {self.type}"
        if self.unit:
            yield f"# UNIT {name} {self.unit}"
        yield f"# HELP {name} {escaped(self.about)}"
        for suffix, labels, value in self.samples:
            yield f"{name}{suffix}{_in_braces(labels)} {_number(value)}"


Several = float | Iterable[tuple[Labels, float]]
"""A value without labels, or labels with a value each."""


def gauge(name: str, about: str, values: Several, *, unit: str = "") -> Metric:
    """A value that goes up and down."""
    samples = tuple(("", labels, value) for labels, value in _several(values))
    return Metric(MetricType.GAUGE, name, about, samples, unit)


def counter(name: str, about: str, values: Several, *, unit: str = "") -> Metric:
    """A number that only rises, but for a restart of what counts."""
    samples = tuple(("_total", labels, value) for labels, value in _several(values))
    return Metric(MetricType.COUNTER, name, about, samples, unit)


def summary(name: str, about: str, count: int, total: float, *, unit: str = "") -> Metric:
    """How often something was measured, and the sum of what was."""
    samples: tuple[tuple[str, Labels, float], ...]
    samples = (("_count", {}, float(count)), ("_sum", {}, total))
    return Metric(MetricType.SUMMARY, name, about, samples, unit)


def _several(values: Several) -> Iterable[tuple[Labels, float]]:
    return [({}, float(values))] if isinstance(values, int | float) else values


def escaped(text: str) -> str:
    """Text in the way of the format. What is no UTF-8, such as in a file's name, is replaced."""
    whole = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return whole.translate(_ESCAPES)


def _in_braces(labels: Labels) -> str:
    inner = ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
    return f"{{{inner}}}" if inner else ""


def _number(value: float) -> str:
    """A number, without a needless fraction, and with all digits."""
    return str(int(value)) if value == int(value) and abs(value) < 1 << 53 else repr(value)


@dataclass(frozen=True, slots=True)
class Collected:
    """The metrics of a part.

    :param fault: why something is missing.
    """

    part: str
    metrics: tuple[Metric, ...]
    fault: BrineError | None = None


def collect() -> Iterator[Collected]:
    """Ask each part that is installed for its metrics. One that fails does not keep the others
    from theirs."""
    for entry in sorted(entry_points(_GROUP)):
        yield collected(entry.name, entry.load)


def collected(part: str, load: Callable[[], Any]) -> Collected:
    """The metrics of a part.

    :param load: returns the function of its entry point.
    """
    found: list[Metric] = []
    try:
        found.extend(load()())
    except BrineError as error:
        return Collected(part, tuple(found), error)
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return Collected(part, tuple(found), BrineError(text))
    except Exception as error:  # such as a part of another version, during an upgrade
        return Collected(part, tuple(found), BrineError(f"{type(error).__name__}: {error}"))
    return Collected(part, tuple(found))


def exposition(all_parts: Iterable[Collected]) -> str:
    """The whole text, with a gauge that tells whose figures are missing."""
    lines: list[str] = []
    told: list[tuple[Labels, float]] = []
    for one in all_parts:
        told.append(({"part": one.part}, float(one.fault is None)))
        for metric in one.metrics:
            lines += metric.lines()
    about = "Whether all figures of a part could be had."
    lines += gauge("collector_success", about, told).lines()
    return "".join(f"{line}\n" for line in lines) + _END
