"""What concerns QEMU alone."""
