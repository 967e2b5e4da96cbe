"""Starting and listing instances, beside libvirt's commands and beside what can't be less."""
