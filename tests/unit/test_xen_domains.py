"""What `xl list` says: every row that was seen, and rows that nobody has."""

from __future__ import annotations

import pytest

from brine.instance.xen.xl import Domain, ShutdownReason, parse_list

UUID = "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f"
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
    assert unknown == []
    assert domains == [
        Domain("web1", 1, 32, 1, "-b----"),
        Domain("web2", 12, 64, 2, "---s--"),
        Domain("(null)", 7, 0, 1, "--ps-d"),
    ]


def test_with_uuid_and_reason() -> None:
    domains, unknown = parse_list(LONG)
    assert unknown == []
    assert [domain.uuid for domain in domains] == [UUID] * 3
    assert [domain.reason for domain in domains] == [None, ShutdownReason.CRASH, None]


def test_a_row_that_nobody_knows_does_not_stop_the_others() -> None:
    strange = ["web9 has an odd day", "web8   8  64  1  -b----", "libxl: error: no answer"]
    lines = LIST.splitlines()
    text = "\n".join([lines[0], strange[0], *lines[1:3], *strange[1:], *lines[3:]])
    domains, unknown = parse_list(text)
    assert [domain.name for domain in domains] == ["web1", "web2", "(null)"]
    assert unknown == strange


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
