"""The hypervisor Xen, through xl."""
