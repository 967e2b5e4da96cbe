"""Ties instances to their owners."""

__version__ = "0.2.0"
