"""The code that all parts of Brine share."""

__version__ = "0.2.0"
