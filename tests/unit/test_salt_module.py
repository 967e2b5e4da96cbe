"""Salt's execution module, on what the ``brine`` command prints, and the grain."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from brine.common import cli
from brine.common.entry_points import EntryPoint
from unit.salt_loader import CommandExecutionError, execution_module, load

SPEC = {"name": "web1", "memory_mib": 512}


class Runs:
    """A stand-in for Salt's cmd.run_all. It keeps its last command, and gives a set answer."""

    def __init__(self, out: str = "{}", error: str = "", status: int = 0) -> None:
        self.result = {"stdout": out, "stderr": error, "retcode": status}
        self.command: list[str] = []
        self.given: dict[str, Any] = {}

    def __call__(self, command: list[str], **given: Any) -> dict[str, Any]:
        self.command, self.given = command, given
        return self.result


def test_the_health_of_a_node_is_one_answer() -> None:
    module = execution_module(Runs("[]", "brine: error: no\n", 1))
    vars(module)["__salt__"]["grains.get"] = lambda name: {"of": name}
    told = module.health()
    assert told.pop("grains") == {"of": "brine"}
    assert told.keys() == {"instances", "outbox", "serial"}
    assert all(one == {"said": [], "refused": "brine: error: no"} for one in told.values())


@pytest.mark.parametrize(
    ("function", "arguments", "options", "command"),
    [
        ("list_", [], {}, "instance list"),
        ("info", ["web1"], {}, "instance info web1"),
        ("start", ["a", "b"], {"keep_tries": True}, "instance start a b --keep-tries"),
        ("stop", ["web1"], {"force": True, "timeout": 5}, "instance stop web1 --force --timeout=5"),
        ("reboot", ["web1"], {"reset": True}, "instance reboot web1 --reset"),
        ("define", [SPEC], {"test": True}, "instance define - --dry-run"),
        ("undefine", ["web1"], {}, "instance undefine web1"),
        ("nic_list", ["web1"], {}, "nic list web1"),
        ("nic_add", ["web1"], {"link": "br0", "vlan": 100}, "nic add web1 --link=br0 --vlan=100"),
        ("nic_add", ["web1"], {"ip": ["::1", "::2"]}, "nic add web1 --ip=::1 --ip=::2"),
        ("nic_modify", ["web1", "n"], {"no_vhost": True}, "nic modify web1 n --no-vhost"),
        ("nic_remove", ["web1", "n"], {"test": True}, "nic remove web1 n --dry-run"),
        ("disk_list", ["web1"], {}, "disk list web1"),
        ("disk_add", ["web1", "/d"], {"read_only": True}, "disk add web1 --path=/d --read-only"),
        ("disk_remove", ["web1", "/d"], {"__pub_jid": "1"}, "disk remove web1 /d"),
        ("storage_list", [], {"type": "file"}, "storage list --type=file"),
        ("storage_check", [], {}, "storage check"),
        (
            "storage_modify",
            ["lvm-pv", "/dev/sdb", False],
            {},
            "storage modify lvm-pv /dev/sdb --allocatable=no",
        ),
        ("verdicts", ["web1"], {"since": "1h"}, "kvmd verdicts web1 --since=1h"),
        ("confd_ping", [], {"timeout": 5}, "confd ping --timeout=5"),
        ("confd_query", ["node-role", "kvm1"], {}, "confd query node-role kvm1"),
        ("config_show", ["/cluster"], {}, "config show /cluster"),
        ("config_apply", [{}], {"prune": True}, "config apply - --prune"),
        ("config_verify", [], {}, "config verify"),
        ("config_versions", [], {}, "config versions"),
        ("watcher_status", [], {}, "watcher status"),
        ("watcher_run", [], {"test": True}, "watcher run --dry-run"),
        ("watcher_pause", ["1h"], {}, "watcher pause 1h"),
        ("watcher_resume", [], {}, "watcher resume"),
        ("watcher_forget", ["web1"], {}, "watcher forget web1"),
        ("outbox_list", [], {}, "outbox list"),
        ("outbox_acknowledge", ["1", "2"], {}, "outbox acknowledge 1 2"),
    ],
)
def test_each_function_is_a_command_with_json_that_brine_understands(
    function: str,
    arguments: list[Any],
    options: dict[str, Any],
    command: str,
) -> None:
    runs = Runs('{"name": "web1"}')
    module = execution_module(runs)
    assert getattr(module, function)(*arguments, **options) == {"name": "web1"}
    assert runs.command == ["brine", *command.split(), "--json"]
    noun, *words = runs.command[1:]
    (entry,) = (one for one in COMMANDS if one[0] == noun)
    parser = cli.Parser()
    EntryPoint(noun, entry[1]).load().configure(parser)
    assert parser.parse_args(words).json


COMMANDS = [
    *(
        (noun, f"brine.{noun}.cli:COMMAND")
        for noun in ("instance", "config", "confd", "storage", "watcher")
    ),
    ("kvmd", "brine.kvmd.cli:COMMAND"),
    ("nic", "brine.hotplug.cli:NIC"),
    ("disk", "brine.hotplug.cli:DISK"),
    ("outbox", "brine.common.cli:OUTBOX"),
]


def test_what_is_declared_is_input_and_is_not_logged() -> None:
    runs = Runs()
    execution_module(runs).define({**SPEC, "password": "secret"})
    assert json.loads(runs.given["stdin"])["password"] == "secret"
    assert "secret" not in str(runs.command)
    assert runs.given["output_loglevel"] == "quiet"
    assert runs.given["python_shell"] is False
    # Else Salt replaces what JSON has for a newline, and what comes out is no JSON.
    assert runs.given["stdin_raw_newlines"] is True


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (Runs("", "brine: error: no\nbrine: hint: do\n", 1), "brine: error: no; do"),
        (Runs("secret", "", 3), "brine instance define - --json failed with status 3"),
        (Runs("secret", "", 0), "succeeded, but did not print JSON"),
    ],
)
def test_a_failure_is_one_line(runs: Callable[..., Any], said: str) -> None:
    with pytest.raises(CommandExecutionError) as caught:
        execution_module(runs).define({"password": "secret"})
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_fails_in_part_is_returned_and_told(caplog: pytest.LogCaptureFixture) -> None:
    module = execution_module(Runs("[]", "brine: error: web1: its spec is damaged", 1))
    assert module.list_() == []
    assert module.__context__ == {"retcode": 1}
    assert "its spec is damaged" in caplog.text


def test_each_function_has_an_example() -> None:
    module = execution_module(Runs())
    functions = inspect.getmembers(module, inspect.isfunction)
    for name, function in functions:
        if not name.startswith("_"):
            called = f" brine.{module.__func_alias__.get(name, name)}"
            assert called in (inspect.getdoc(function) or "").partition("CLI Example::")[2]


def test_the_grain_needs_no_process(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "brine_common-0.2.0.dist-info",
        "brine_kvmd-0.2.0.egg-info",
        "brinery-1.dist-info",
    ):
        (tmp_path / name).mkdir()
    capabilities = tmp_path / "capabilities"
    module = load("grains", "brine", _FOLDERS=[str(tmp_path)], _XEN=str(capabilities))
    monkeypatch.setattr(module.os.path, "exists", lambda path: path == "/dev/kvm")
    whole = {"version": "0.2.0", "parts": ["kvmd"], "hypervisor": "kvm"}
    assert module.brine() == {"brine": whole}
    capabilities.write_text("control_d\n")
    assert module.brine() == {"brine": {**whole, "hypervisor": "xen"}}
    nothing = load("grains", "brine", _FOLDERS=[], _XEN="/nowhere")
    monkeypatch.setattr(module.os.path, "exists", lambda path: False)
    assert nothing.brine() == {"brine": {"version": "", "parts": [], "hypervisor": ""}}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{instances: {on: {}}}", "/instances/True: a key must be a string: put it in quotes"),
        ("{nodes: {100: {}}}", "/nodes/100: a key must be a string: put it in quotes"),
        ("{nodes: {null: {}}}", "/nodes/None: a key must be a string: put it in quotes"),
        ("{nodes: {1.5: {}}}", "/nodes/1.5: a key must be a string: put it in quotes"),
        ("{a/b: {2026-05-04: {}}}", "/a~1b/2026-05-04: a key must be a string: put it in quotes"),
        ("{c: [2026-05-04]}", "/c/0: is a date, which JSON lacks: put it in quotes"),
        ("{c: 2026-05-04 10:00:00}", "/c: is a datetime, which JSON lacks: put it in quotes"),
        ("{c: !!set {a, b}}", "/c: is a set, which JSON lacks: put it in quotes"),
        ("{c: !!binary aGkK}", "/c: is a bytes, which JSON lacks: put it in quotes"),
    ],
)
@pytest.mark.parametrize("function", ["config_apply", "define"])
def test_what_yaml_has_and_json_lacks_is_refused(function: str, text: str, fault: str) -> None:
    runs = Runs()
    module = execution_module(runs)
    with pytest.raises(CommandExecutionError, match=f"^{re.escape(fault)}$"):
        getattr(module, function)(yaml.safe_load(text))
    assert runs.command == []
