"""Ties instances to their owners."""
