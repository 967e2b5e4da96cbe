"""Plugging NICs and disks, beside libvirt's commands and beside the bare QMP round trips."""
