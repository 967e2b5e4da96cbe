"""The KVM daemon: one process, every VM's QMP event socket, one verdict for each end."""
