"""QEMU Machine Protocol: its lines, and clients."""
