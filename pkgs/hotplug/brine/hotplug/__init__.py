"""Taps, and NICs and disks that plug into any running QEMU with a QMP socket."""
