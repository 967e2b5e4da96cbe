"""The hypervisor QEMU."""
