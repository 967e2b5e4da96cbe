"""A VM on its node: its spec with disks and NICs, its files, its runs, and what no two VMs have."""
