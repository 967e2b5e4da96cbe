"""Throw-away nodes and guests on one machine: the parts that Brine's tests and demo are made of.

A *machine* is somewhere commands run: the host itself, or a node. A *node* is a Debian system with
its own systemd in a container; a *guest* is a real QEMU virtual machine on a machine.

    with boot_node("trixie") as node:
        node.run(["systemctl", "status"])
        with start_guest(node, "web1", control_dir="/run/brine/ctrl") as guest:
            guest.wait_ready()
            guest.order("poweroff")
            guest.wait()

Everything is a context manager and leaves nothing behind. Nodes start from cached trees
(`lab.images`) in about a second, guests from a cached kernel and initramfs (`lab.guest_image`) in
about two. Nodes need root and Debian; guests on the host need neither.

The lab never uses Brine's own code: what is tested is not tested with itself.
"""
