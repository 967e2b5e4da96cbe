"""xl's output and faults: known rows, unknown rows, failures."""
# ruff: noqa: E501

from __future__ import annotations

from pathlib import Path

import pytest

from brine.common.errors import install_hint
from brine.instance.xen import xl
from brine.instance.xen.xl import Domain, ShutdownReason, XlError, fault_in, parse_list
from lab.scripted_xl import ScriptedXl

UUID = "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f"
OTHER = "6f1b5c1e-8a3b-4a50-9d0e-000000000000"
LIST = """\
Name                                        ID   Mem VCPUs	State	Time(s)
Domain-0                                     0  1536     2     r-----      21.9
web1                                         1    32     1     -b----       0.4
web2                                        12    64     2     ---s--       1.0
(null)                                       7     0     1     --ps-d       0.4
"""
HEADING = "Name  ID   Mem VCPUs\tState\tTime(s) UUID       Reason-Code\tSecurity Label"
NOBODY = "00000000-0000-0000-0000-000000000000"
LONG = f"""\
{HEADING}
Domain-0               0  1536     2     r-----      21.9 {NOBODY}        -                -
web1                   1    32     1     -b----       0.4 {UUID}        -                -
web2                   2    64     2     ---sc-       1.0 {UUID}        3                -
web3                  13    64     2     ---s--       1.0 {UUID} ffffffff                -
"""


def test_domains_without_the_control_domain() -> None:
    domains, unknown = parse_list(LIST)
    assert unknown == ()
    assert domains == (
        Domain("web1", 1, 32, 1, "-b----", cpu_s=0.4),
        Domain("web2", 12, 64, 2, "---s--", cpu_s=1.0),
        Domain("(null)", 7, 0, 1, "--ps-d", cpu_s=0.4),
    )


def test_with_uuid_and_reason() -> None:
    domains, unknown = parse_list(LONG)
    assert unknown == ()
    assert [domain.uuid for domain in domains] == [UUID] * 3
    assert [domain.reason for domain in domains] == [None, ShutdownReason.CRASH, None]


def test_a_row_that_nobody_knows_does_not_stop_the_others() -> None:
    strange = ["web9 has an odd day", "web8   8  64  1  -b----", "libxl: error: no answer"]
    lines = LIST.splitlines()
    text = "\n".join([lines[0], strange[0], *lines[1:3], *strange[1:], *lines[3:]])
    domains, unknown = parse_list(text)
    assert [domain.name for domain in domains] == ["web1", "web2", "(null)"]
    assert unknown == tuple(strange)


def test_a_name_with_blanks_is_one_name() -> None:
    domains, _ = parse_list("my web   3  32   1   r-----   0.4\n")
    assert [domain.name for domain in domains] == ["my web"]


STATES = {
    # state: (known, ended, crashed, dying)
    "r-----": (True, False, False, False),
    "-b----": (True, False, False, False),
    "rb----": (True, False, False, False),
    "------": (True, False, False, False),
    "--p---": (True, False, False, False),
    "-bp---": (True, False, False, False),
    "---s--": (True, True, False, False),
    "--ps--": (True, True, False, False),
    "---sc-": (True, True, True, False),
    "----c-": (True, True, True, False),
    "--psc-": (True, True, True, False),
    "-----d": (True, False, False, True),
    "---s-d": (True, False, False, True),
    "--p-cd": (True, False, True, True),
    "--ps-d": (True, False, False, True),
    "------x": (False, False, False, False),
    "x-----": (False, False, False, False),
    "s-----": (False, False, False, False),
    "----r-": (True, False, False, False),
    "---sr-": (True, True, False, False),
    "---ss-": (True, True, False, False),
    "---sw-": (True, True, False, False),
    "---s?-": (True, True, False, False),
    "-----": (False, False, False, False),
}


@pytest.mark.parametrize("state", STATES)
def test_states(state: str) -> None:
    (domain,), _ = parse_list(f"web1   3  32   1   {state}   0.4\n")
    found = (domain.is_known(), domain.has_ended(), domain.has_crashed(), domain.is_dying())
    assert found == STATES[state]


@pytest.mark.parametrize("reason", ShutdownReason)
def test_the_reason_says_more_than_the_flags(reason: ShutdownReason) -> None:
    (domain,), _ = parse_list(f"web1   3  32   1   ---s--   0.4 {UUID}   {reason:x}   -\n")
    assert domain.reason == reason
    assert domain.has_crashed() == (reason in (ShutdownReason.CRASH, ShutdownReason.WATCHDOG))


@pytest.mark.parametrize(
    ("name", "state", "is_zombie"),
    [
        ("(null)", "-----d", True),
        ("(null)", "--ps-d", True),
        ("(null)", "--p---", False),  # which is just being made
        ("web1", "-----d", False),
    ],
)
def test_a_zombie_has_lost_its_name_and_dies(name: str, state: str, is_zombie: bool) -> None:
    (domain,), _ = parse_list(f"{name}   3  0   1   {state}   0.4\n")
    assert domain.is_zombie() is is_zombie


# Commands


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedXl:
    return ScriptedXl(tmp_path / "bin", monkeypatch)


def test_a_domain_is_known_by_its_uuid(scripted: ScriptedXl) -> None:
    scripted.domain("web1", 3, "-b----", OTHER)
    assert xl.domain_of(UUID) is None
    scripted.domain("web2", 4, "---s--", UUID, 0)
    found = xl.domain_of(UUID)
    assert found
    assert (found.number, found.reason) == (4, 0)


def test_of_several_the_one_that_lives_counts(scripted: ScriptedXl) -> None:
    scripted.domain("(null)", 3, "--ps-d", UUID)
    scripted.domain("web1", 4, "---s--", UUID, 0)
    assert getattr(xl.domain_of(UUID), "number", None) == 4
    scripted.domain("web1", 2, "-b----", UUID)
    assert getattr(xl.domain_of(UUID), "number", None) == 2


def test_a_row_of_ours_that_nobody_knows_is_an_error(scripted: ScriptedXl) -> None:
    scripted.rows([f"web1 is on holiday {OTHER}", f"web2 is, too {UUID}"])
    assert len(xl.domains().unknown) == 2
    with pytest.raises(XlError, match="not known here"):
        xl.domain_of(UUID)


def test_only_what_is_still_there_is_destroyed(scripted: ScriptedXl) -> None:
    scripted.domain("web1", 3, "---s--", UUID, 0)
    before = xl.domain_of(UUID)
    assert before
    assert xl.destroy(before)
    assert scripted.asked() == ["destroy 3"]
    assert not xl.destroy(before)
    # Another one has its number by now.
    scripted.domain("web2", 3, "---s--", OTHER, 0)
    assert not xl.destroy(before)
    assert scripted.asked() == ["destroy 3"]


def test_what_xl_refuses_is_told_in_a_line(scripted: ScriptedXl) -> None:
    said = "libxl: error: libxl_domain.c:850:pvcontrol_cb: guest didn't acknowledge: -9"
    scripted.refuse("shutdown", f"{said}\nshutdown failed (rc=-9)\n")
    with pytest.raises(XlError, match=r"^xl shutdown 3: guest didn't acknowledge: -9$"):
        xl.ask_shutdown(3, timeout_s=10)
    scripted.refuse("shutdown", "")
    with pytest.raises(XlError, match=r"^xl shutdown 3: 1$"):
        xl.ask_shutdown(3, timeout_s=10)


def test_a_node_without_xl_has_no_domains_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert xl.domains().domains == ()
    with pytest.raises(XlError, match="there is no program xl") as caught:
        xl.ask_shutdown(3, timeout_s=10)
    assert install_hint(apt="xen-utils", dnf="xen-runtime") in (caught.value.hint or "")


def test_an_xl_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "xl"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(XlError, match=r"^xl shutdown 3: no answer within 0.1 s"):
        xl.ask_shutdown(3, timeout_s=0.1)


# Why xl failed: one line of the many that Xen 4.20 said


AFTER = """\
libxl: error: libxl_dom.c:641:libxl__build_pv: xc_dom_kernel_file failed: No such file or directory
libxl: error: libxl_domain.c:1133:domain_destroy_callback: Domain 5:Unable to destroy guest
"""
CHILD = "libxl: error: libxl_exec.c:117:libxl_report_child_exitstatus:"
SCRIPT = "libxl: error: libxl_device.c:1351:device_hotplug_child_death_cb: script: no bridge nobr"


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "xc: error: panic: xg_dom_core.c:205: failed to open file '/k': No such file: Internal error",
            "failed to open file '/k': No such file",
        ),
        (
            "xc: error: panic: xg_dom_boot.c:119: xc_dom_boot_mem_init: can't allocate low memory",
            "can't allocate low memory",
        ),
        (
            'libxl: error: libxl_domain.c:81:libxl__domain_rename: Domain 3:Domain with name "a" exists.',
            'Domain with name "a" exists.',
        ),
        (
            "libxl: error: libxl_device.c:468:libxl__device_disk_set_backend: Disk vdev=xvda failed",
            "Disk vdev=xvda failed",
        ),
        (
            f"{CHILD} /etc/xen/scripts/vif-bridge online [501] exited with error status 1\n{SCRIPT}",
            "script: no bridge nobr",
        ),
        (
            "c.cfg:12: config parsing error near `\"mac=52': lexical error",
            "c.cfg:12: config parsing error near `\"mac=52': lexical error",
        ),
    ],
)
def test_the_cause_of_what_followed(said: str, cause: str) -> None:
    lines = ["Parsing config from /run/brine/xen/web1.cfg", *f"{said}\n{AFTER}".splitlines()]
    assert fault_in(lines) == cause


def test_of_what_is_no_fault_nothing_is_said() -> None:
    assert (
        fault_in(["Parsing config from /a.cfg", "Waiting for domain web1 (domid 1) to die"]) is None
    )


def test_the_memory_is_xens_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, hypervisor = ScriptedXl(tmp_path, monkeypatch), tmp_path / "type"
    monkeypatch.setattr(xl, "_HYPERVISOR", hypervisor)
    assert xl.memory() is None
    hypervisor.write_text("xen\n")
    tool.memory(8191, 5120)
    assert xl.memory() == (8191, 5120)
    tool.refuse("info", "libxl: error: no such Xen\n")
    with pytest.raises(XlError):
        xl.memory()
