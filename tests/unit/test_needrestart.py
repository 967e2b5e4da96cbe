"""Brine's file for needrestart."""

from __future__ import annotations

import subprocess

import pytest

from lab.tree import TREE

FILE = TREE / "pkgs/instance/system/needrestart/brine-instance.conf"

# As needrestart does: its configuration is Perl, and a unit that matches no pattern is restarted.
ASK = """
our %nrconf = (override_rc => {}, defno => 1);
eval do { local (@ARGV, $/) = $ARGV[0]; <> };
die $@ if $@;
foreach my $re (keys %{$nrconf{override_rc}}) {
    next unless $ARGV[1] =~ /$re/;
    print $nrconf{override_rc}->{$re};
    exit;
}
print "restarted";
"""


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        ("brine-instance@web1.service", "0"),
        ("brine-instances.service", "restarted"),
        ("brine-kvmd.service", "restarted"),
    ],
)
def test_instances_are_left_alone_and_daemons_are_not(unit: str, said: str) -> None:
    command = ["/usr/bin/perl", "-e", ASK, str(FILE), unit]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == said
