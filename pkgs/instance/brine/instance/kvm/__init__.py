"""What is of QEMU alone."""
