"""Benchmarks: Brine's speed beside a peer's. Each subject has a module."""
