"""Why xl failed: one line of the many that Xen 4.20 said."""
# ruff: noqa: E501

from __future__ import annotations

import pytest

from brine.instance.xen.xl import fault_in

AFTER = """\
libxl: error: libxl_domain.c:354:libxl_domain_info: Domain 5:Getting domain info: No such process
libxl: error: libxl_domain.c:1133:domain_destroy_callback: Domain 5:Unable to destroy guest
libxl: error: libxl_domain.c:1060:domain_destroy_cb: Domain 5:Destruction of domain failed
"""

SAID = {
    "no kernel": (
        """\
xc: error: panic: xg_dom_core.c:205: failed to open file '/k': No such file or directory: Internal error
libxl: error: libxl_dom.c:641:libxl__build_pv: xc_dom_kernel_file failed: No such file or directory
libxl: error: libxl_create.c:1695:domcreate_rebuild_done: Domain 4:cannot (re-)build domain: -3
""",
        "failed to open file '/k': No such file or directory",
    ),
    "no memory": (
        """\
xc: error: panic: xg_dom_boot.c:119: xc_dom_boot_mem_init: can't allocate low memory for domain: Out of memory
libxl: error: libxl_dom.c:581:libxl__build_dom: xc_dom_boot_mem_init failed: Cannot allocate memory
""",
        "can't allocate low memory for domain: Out of memory",
    ),
    "the same name": (
        """\
libxl: error: libxl_domain.c:81:libxl__domain_rename: Domain 3:Domain with name "a" already exists.
libxl: error: libxl_create.c:1351:initiate_domain_create: Domain 3:cannot make domain: -6
""",
        'Domain with name "a" already exists.',
    ),
    "no disk": (
        """\
libxl: error: libxl_device.c:468:libxl__device_disk_set_backend: Disk vdev=xvda failed to stat: /d: No such file or directory
libxl: error: libxl_create.c:1373:initiate_domain_create: Domain 7:Unable to set disk defaults for disk 0
""",
        "Disk vdev=xvda failed to stat: /d: No such file or directory",
    ),
    "no bridge": (
        """\
libxl: error: libxl_exec.c:117:libxl_report_child_exitstatus: /etc/xen/scripts/vif-bridge online [501] exited with error status 1
libxl: error: libxl_device.c:1351:device_hotplug_child_death_cb: script: Could not find bridge device nobr
libxl: error: libxl_create.c:1982:domcreate_attach_devices: Domain 9:unable to add vif devices
""",
        "script: Could not find bridge device nobr",
    ),
    "no system on the disk": (
        """\
libxl: error: libxl_bootloader.c:766:bootloader_finished: Domain 10:bootloader failed - consult logfile /var/log/xen/bootloader.10.log
libxl: error: libxl_exec.c:117:libxl_report_child_exitstatus: bootloader [570] exited with error status 1
""",
        "bootloader failed - consult logfile /var/log/xen/bootloader.10.log",
    ),
    "a line of the administrator's": (
        """\
c.cfg:12: config parsing error near `"mac=52': lexical error
Failed to parse config: Invalid argument
""",
        "c.cfg:12: config parsing error near `\"mac=52': lexical error",
    ),
    "a domain that does not listen": (
        """\
libxl: error: libxl_domain.c:850:pvcontrol_cb: guest didn't acknowledge control request: -9
shutdown failed (rc=-9)
""",
        "guest didn't acknowledge control request: -9",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_the_cause_of_what_followed(case: str) -> None:
    said, cause = SAID[case]
    lines = ["Parsing config from /run/brine/xen/web1.cfg", *(said + AFTER).splitlines()]
    assert fault_in(lines) == cause


def test_of_what_is_no_fault_nothing_is_said() -> None:
    said = [
        "Parsing config from /run/brine/xen/web1.cfg",
        "Waiting for domain web1 (domid 1) to die",
    ]
    assert fault_in(said) is None
    assert fault_in([]) is None
