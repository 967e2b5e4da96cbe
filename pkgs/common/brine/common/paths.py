"""Where Brine's files are. The design's table of files is the source."""

from pathlib import Path

ETC_DIR = Path("/etc/brine")
CONTROL_DIR = Path("/run/brine/ctrl")


def settings_file(daemon: str) -> Path:
    """The settings of one daemon, e.g. ``/etc/brine/kvmd.toml`` for ``kvmd``; may be absent."""
    return ETC_DIR / f"{daemon}.toml"
