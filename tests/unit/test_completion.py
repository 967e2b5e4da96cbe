from collections.abc import Callable
from pathlib import Path

import pytest

from brine.common import cli
from brine.common.completion import complete
from brine.hotplug import cli as hotplug_cli
from brine.instance import cli as instance_cli

COMMANDS = {"instance": instance_cli.COMMAND, "nic": hotplug_cli.NIC}


def completed(line: str) -> dict[str, str]:
    """What may end a line, with the descriptions."""

    def parser_of(noun: str, verb: str | None) -> cli.Parser | None:
        return cli.parser_of(noun, COMMANDS[noun], verb) if noun in COMMANDS else None

    texts = [(name, one.summary) for name, one in COMMANDS.items()]
    lines = complete(line.split(" ")[1:], texts, parser_of)
    return {word: text for word, _, text in (one.partition("\t") for one in lines)}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("brine ", {"instance", "nic"}),
        ("brine i", {"instance"}),
        ("brine -", {"--help", "--version"}),
        ("brine instance re", {"reboot", "rename", "resume"}),
        ("brine instance start --a", {"--all"}),
        ("brine instance start web1 --k", {"--keep-tries"}),
        (
            "brine instance stop --all --",
            {"--help", "--json", "--timeout", "--force", "--parallel"},
        ),
        ("brine instance import x --accel ", {"kvm", "tcg"}),
        ("brine instance import x --accel t", {"tcg"}),
        ("brine instance import --accel tcg x --accel", set()),
        ("brine instance import ", {":files"}),
        ("brine instance import --name ", set()),
        ("brine instance import --name x ", {":files"}),
        ("brine nic add --mode ", {"bridged", "routed", "openvswitch"}),
        ("brine instance frobnicate ", set()),
        ("brine frobnicate x ", set()),
        ("brine instance rename web1 ", set()),
        ("brine instance start -- ", set()),
    ],
)
def test_what_may_follow(line: str, words: set[str]) -> None:
    assert set(completed(line)) == words


def test_each_word_has_its_help() -> None:
    assert completed("brine instance sto")["stop"] == "shut instances' guests down"
    assert completed("brine nic add --mo")["--mode"].startswith("default:")
    assert completed("brine in")["instance"] == "run virtual machines under systemd"
    assert all("%(" not in text for text in completed("brine nic add --").values())


def test_instances_are_those_of_the_node_and_none_twice(
    own_node: Path, brine: Callable[..., tuple[int, str, str]]
) -> None:
    for name in ("web1", "web2", "db1"):
        assert brine("define", "-", stdin={"name": name})[0] == 0
    assert set(completed("brine instance start ")) == {"web1", "web2", "db1"}
    assert set(completed("brine instance start web1 ")) == {"web2", "db1"}
    assert set(completed("brine instance edit web")) == {"web1", "web2"}
    assert set(completed("brine instance edit web1 ")) == set()
