"""The settings of ``/etc/brine/metrics.toml``; see brine-metrics(1)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError, die
from brine.common.settings import load, setting

_PROGRAM = "brine-metrics"


def _folder_fault(path: str) -> str | None:
    return None if path.startswith("/") else f"must be an absolute path, but is {path!r}"


@dataclass(frozen=True)
class MetricsSettings:
    """How a node's metrics are left for node_exporter, each setting with its default."""

    textfile: str = setting("auto", choices=("auto", "on", "off"))
    """Whether the timer writes a file: ``auto`` is where the folder exists."""

    textfile_dir: str = setting("/var/lib/prometheus/node-exporter", check=_folder_fault)
    """The folder that node_exporter's textfile collector reads."""


def load_settings() -> MetricsSettings:
    """The settings of this node."""
    return load(MetricsSettings, paths.settings_file("metrics"))


def main() -> None:
    """Check the file that is named on the command line, before it is put in place."""
    try:
        load(MetricsSettings, Path(sys.argv[1] if len(sys.argv) == 2 else ""), required=True)
    except BrineError as error:
        die(_PROGRAM, error, 1)


if __name__ == "__main__":
    main()
