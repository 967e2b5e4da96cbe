"""The code that all parts of Brine share."""

__version__ = "0.3.0"

ALLOCATIONS = 50_000
"""How many objects a short-lived process makes before Python looks for garbage: they are classes
and data that stay until it ends. With Python's own 700, the looks take a tenth of its time."""
