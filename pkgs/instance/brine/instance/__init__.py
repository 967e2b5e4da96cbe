"""Virtual machines under systemd: one spec, one unit, one honest state."""

__version__ = "0.2.0"
