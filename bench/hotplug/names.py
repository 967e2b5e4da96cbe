"""The names of what is measured alone."""

PASS, USUAL = "python3 -c pass", "import argparse, json, asyncio"
VIRSH_VERSION = "virsh --version"
TAP_BARE = "the system calls alone"
TAP_IP = "ip tuntap add; ip link set master ... up"
TAP_LIBRARY = "library: open_tap() and wire()"
TAP_COMMAND = "brine tap up"

WITHOUT_NETLINK = (
    "brine --help",
    "brine disk --help",
    "brine nic --help",
    "brine tap --help",
    "brine disk list --qmp",
    "brine nic list --qmp",
)
