"""Virtual machines under systemd: a spec, a unit and a state for each."""

__version__ = "0.2.0"
