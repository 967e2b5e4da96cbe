"""What every part of Brine shares."""

__version__ = "0.1.0"
