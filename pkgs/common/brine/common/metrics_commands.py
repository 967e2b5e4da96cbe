"""``brine metrics``: the figures of all parts of this node, printed or put where node_exporter's
textfile collector reads them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from brine.common.errors import BrineError, root_hint, tell_error
from brine.common.files import write_whole
from brine.common.metrics import Collected, collect, exposition
from brine.common.metrics_settings import load_settings

FILE_NAME = "brine.prom"
_MODE = 0o644


def print_metrics(arguments: argparse.Namespace) -> int:
    """``brine metrics``: 1 if figures of a part are missing."""
    if not arguments.textfile:
        found = list(collect())
        text = json.dumps([*_rows(found)], indent=2) + "\n" if arguments.json else exposition(found)
        sys.stdout.write(text)
        return _told(found)
    settings = load_settings()
    folder = Path(settings.textfile_dir)
    if settings.textfile == "off":
        print("unchanged: metrics.toml has the textfile off")
        return 0
    if not folder.is_dir():
        if settings.textfile == "auto":
            print(f"unchanged: there is no folder {folder}, so node_exporter is not here")
            return 0
        hint = "install prometheus-node-exporter, or set textfile_dir in /etc/brine/metrics.toml"
        raise BrineError(f"{folder}: there is no such folder", hint=hint)
    found = list(collect())
    _put(folder / FILE_NAME, exposition(found))
    return _told(found)


def _put(file: Path, text: str) -> None:
    """Put the file in place as a whole: node_exporter may read it at any time. A fault leaves the
    file of before, whose age node_exporter tells (``node_textfile_mtime_seconds``)."""
    try:
        # Readers need no file that survives a power cut: the next is there a minute after the boot.
        write_whole(file, text.encode(), mode=_MODE, alone=True, durable=False)
    except OSError as error:
        text = f"{file}: can't be written: {error.strerror}"
        raise BrineError(text, hint=root_hint(error)) from error
    print(f"written: {file}")


def _told(found: list[Collected]) -> int:
    """Tell whose figures are missing; returns the exit status."""
    faults = [one for one in found if one.fault]
    for one in faults:
        assert one.fault
        tell_error(one.fault, about=one.part)
    return 1 if faults else 0


def _rows(found: list[Collected]) -> Iterator[dict[str, object]]:
    for part in found:
        for metric in part.metrics:
            for suffix, labels, value in metric.samples:
                name = f"{metric.full_name}{suffix}"
                yield {"name": name, "type": metric.type, "labels": dict(labels), "value": value}
