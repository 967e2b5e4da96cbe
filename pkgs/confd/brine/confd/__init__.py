"""The configuration daemon and its client: ask any master candidate, get a signed answer."""

__version__ = "0.2.0"
