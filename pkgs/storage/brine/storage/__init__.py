"""Storage units, which have the space for the disks of virtual machines."""
