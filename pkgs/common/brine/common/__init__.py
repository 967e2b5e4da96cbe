"""What every part of Brine shares."""

__version__ = "0.2.0"
