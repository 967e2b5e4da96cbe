"""Definitions and images of other programs, as specs. Each format has a module of its own."""
