"""The check of Salt's pillar: what it refuses, how it tells of that, and that it knows all keys."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from brine.config.apply import apply
from brine.config.merge import CLASSES, fill
from docs.pillar_schema import EXAMPLE, SCHEMA, files
from unit.salt_loader import load

SECRET = "c0ffee" * 4


@pytest.fixture
def state() -> ModuleType:
    """The state module, as Salt loads it."""
    return load("states", "brine_pillar")


def faults(state: ModuleType, pillar: dict[str, Any], **options: Any) -> list[str]:
    """The faults that the state finds."""

    def cache_file(path: str, saltenv: str) -> str:
        assert (path, saltenv) == ("salt://brine/schema.json", "dev")
        return str(SCHEMA)

    vars(state).update(__pillar__=pillar, __salt__={"cp.cache_file": cache_file}, __env__="dev")
    result = state.valid("pillar", **options)
    assert result["changes"] == {}
    said: list[str] = result["comment"].splitlines()
    assert result["result"] is (said == ["pillar is as the formula knows it"])
    return [] if result["result"] else said


def of_brine(state: ModuleType, brine: Any) -> list[str]:
    """The faults that it finds in pillar `brine:`."""
    return faults(state, {"brine": brine})


def test_what_keeps_the_external_pillar_from_the_node_is_the_only_fault(state: ModuleType) -> None:
    said = faults(state, {"brine_fault": "it is not merged", "brine": {"version": 5, "x": 1}})
    assert said == ["it is not merged"]


def test_schema_and_reference_are_current() -> None:
    for file, text in files().items():
        assert file.read_text() == text, f"{file.name} is stale: run ./dev pillar-schema"


def test_what_is_documented_is_known_and_what_is_known_is_documented(state: ModuleType) -> None:
    text = EXAMPLE.read_text()
    example = yaml.safe_load(text)
    assert faults(state, example) == []
    for name in example["brine"]["instance"]["instances"]:
        assert faults(state, example, instance=name) == []
    _, of_ganeti = text.split("\n# A node of a Ganeti cluster:\n#\n")
    assert faults(state, yaml.safe_load(of_ganeti.replace("# ", ""))) == []

    formula = json.loads(SCHEMA.read_text())["properties"]["brine"]["properties"]
    for key, node in formula.items():
        if key in (*CLASSES, "distributed"):
            continue
        for inner in node.get("properties", {}) or [""]:
            value = example["brine"][key]
            assert key in example["brine"]
            assert not inner or inner in value, f"pillar.example has no {key}:{inner}"
            described = node["properties"][inner] if inner else node
            assert "description" in described, f"pillar.example does not explain {key}:{inner}"


@pytest.mark.parametrize("pillar", [{}, {"brine": None}, {"brine": {}}, {"other": 5}])
def test_no_pillar_is_all_defaults(state: ModuleType, pillar: dict[str, Any]) -> None:
    assert faults(state, pillar) == []


@pytest.mark.parametrize(
    ("brine", "said"),
    [
        ("text", "brine: must be a mapping, but is a string"),
        (["kvmd"], "brine: must be a mapping, but is a list"),
        ({"kvmdd": None}, "brine:kvmdd: there is no such key; the nearest is kvmd"),
        ({"instancs": {}}, "brine:instancs: there is no such key; the nearest is instances"),
        (
            {"kvmd": {"enabld": True}},
            "brine:kvmd:enabld: there is no such key; the nearest is enabled",
        ),
        (
            {"repository": {"zzz": 1}},
            "brine:repository:zzz: there is no such key; the keys here are key, line",
        ),
        ({"kvmd": 5}, "brine:kvmd: must be a mapping, but is a whole number"),
        ({"kvmd": []}, "brine:kvmd: must be a mapping, but is a list"),
        (
            {"kvmd": {"enabled": "no"}},
            (
                "brine:kvmd:enabled: must be true or false, but is a string; "
                "false, without quotes, is meant"
            ),
        ),
        (
            {"kvmd": {"enabled": 1}},
            "brine:kvmd:enabled: must be true or false, but is a whole number",
        ),
        ({"version": 0.2}, "brine:version: must be a string, but is a number; put it in quotes"),
        (
            {"kvmd": {"settings": {"log_leval": "info"}}},
            "brine:kvmd:settings:log_leval: there is no such key; the nearest is log_level",
        ),
        (
            {"kvmd": {"settings": {"log_level": "loud"}}},
            "brine:kvmd:settings:log_level: must be one of debug, info, warning, error",
        ),
        (
            {"kvmd": {"settings": {"control_dir": "ctrl"}}},
            "brine:kvmd:settings:control_dir: must be an absolute path",
        ),
        (
            {"confd": {"settings": {"workers": 0}}},
            "brine:confd:settings:workers: must be at least 1, but is 0",
        ),
        (
            {"confd": {"settings": {"port": 10**5000}}},
            "brine:confd:settings:port: must be at most 65535, but is far from that",
        ),
        (
            {"watcher": {"settings": {"tries": "5"}}},
            (
                "brine:watcher:settings:tries: must be a whole number, but is a string; "
                "leave out the quotes"
            ),
        ),
        (
            {"kvmd": {"settings": {"rescan_interval_s": float("nan")}}},
            "brine:kvmd:settings:rescan_interval_s: must be a number, but is a float",
        ),
        (
            {"hotplug": {"scripts": {"50.sh": "x"}}},
            "brine:hotplug:scripts:50.sh: a name here is of letters, digits, - and _ only",
        ),
        (
            {"hotplug": {"scripts": {"50-x\n": "x"}}},
            'brine:hotplug:scripts:"50-x\\n": a name here is of letters, digits, - and _ only',
        ),
        (
            {"hotplug": {"scripts": {50: "x"}}},
            (
                "brine:hotplug:scripts:50: a key must be a string, but is a whole number; "
                "put it in quotes"
            ),
        ),
        (
            {"hotplug": {"scripts": {"a": {"b": 1}}}},
            "brine:hotplug:scripts:a: must be a string, but is a mapping",
        ),
        (
            {"storage": {"directory": ["/srv/vms"]}},
            "brine:storage:directory: there is no such key; the nearest is directories",
        ),
        (
            {"storage": {"directories": ["srv/vms"]}},
            "brine:storage:directories:0: must be an absolute path",
        ),
        (
            {"storage": {"directories": "/srv/vms"}},
            "brine:storage:directories: must be a list, but is a string",
        ),
        (
            {"storage": {"directories": [["/srv/vms"]]}},
            "brine:storage:directories:0: must be an absolute path, but is a list",
        ),
        (
            {"storage": {"default_unit": 5}},
            "brine:storage:default_unit: must be a string, but is a whole number; put it in quotes",
        ),
        (
            {"storage": {"allocatable": {"/dev/sdb": "no"}}},
            (
                "brine:storage:allocatable:/dev/sdb: must be true or false, but is a string; "
                "false, without quotes, is meant"
            ),
        ),
        (
            {"instance": {"instances": ["web1"]}},
            "brine:instance:instances: must be a mapping, but is a list",
        ),
        ({"instances": "web1"}, "brine:instances: must be a mapping, but is a string"),
        (
            {"nodes": {"node1": {"primary_i": "192.0.2.1"}}},
            "brine:nodes:node1:primary_i: there is no such key; the nearest is primary_ip",
        ),
        (
            {"cluster": {"candidate_pool_size": "10"}},
            (
                "brine:cluster:candidate_pool_size: must be a whole number, but is a string; "
                "leave out the quotes"
            ),
        ),
        (
            {"confd": {"key": " \n"}},
            "brine:confd:key: is blank; put the cluster's key there, or leave it out",
        ),
        (
            {"confd": {"previous_key": "\t"}},
            "brine:confd:previous_key: is blank; put the cluster's key there, or leave it out",
        ),
        (
            {"confd": {"key": 5}},
            "brine:confd:key: must be a string, but is a whole number; put it in quotes",
        ),
        ({"confd": {"key": "x" * 65537}}, "brine:confd:key: has more than 65536 bytes"),
    ],
)
def test_a_fault_is_one_line(state: ModuleType, brine: Any, said: str) -> None:
    assert of_brine(state, brine) == [said]


@pytest.mark.parametrize(
    "key", ["kv\nmd", "kv\x1b[31mmd", "k" * 10_000, "\ud800", "", 5, True, 1.5, ("a", 1), None]
)
def test_hostile_keys_are_shown_in_one_short_line(state: ModuleType, key: Any) -> None:
    (said,) = of_brine(state, {key: 5})
    assert said.isprintable()
    assert len(said) < 500
    (said,) = of_brine(state, {"hotplug": {"scripts": {key: {}}}})
    assert said.isprintable()


def test_what_has_itself_in_it_is_refused(state: ModuleType) -> None:
    backing: dict[str, Any] = {"path": "/x", "format": "raw"}
    backing["backing"] = backing
    pillar = {"brine": {"instance": {"instances": {"web1": {"disks": [backing]}}}}}
    assert faults(state, pillar, instance="web1") == ["brine: nested too deep"]


def test_many_faults_are_told_and_counted(state: ModuleType) -> None:
    said = of_brine(state, {f"unknown{number}": 1 for number in range(1000)})
    assert len(said) == 51
    assert said[-1] == "and 950 more"


@pytest.mark.parametrize(
    "brine",
    [
        {"confd": SECRET},
        {"confd": {"key": [SECRET]}},
        {"confd": {"key": {"text": SECRET}}},
        {"confd": {"previous_key": {SECRET: 1}}},
        {"confd": {"settings": SECRET}},
        {"confd": {"settings": {"port": SECRET, "log_level": SECRET, "key_file": SECRET}}},
        {"cluster": {"osparams_private_cluster": SECRET, "name": [SECRET]}},
    ],
)
def test_no_text_of_pillar_is_shown(state: ModuleType, brine: dict[str, Any]) -> None:
    said = of_brine(state, brine)
    assert said
    assert SECRET not in "\n".join(said)


def test_null_is_the_default_everywhere(state: ModuleType) -> None:
    brine = {"kvmd": None, "confd": {"key": None, "settings": {"port": None}}, "nodes": None}
    instances = {"instances": {"web1": None}}
    assert of_brine(state, {**brine, **instances, "instance": instances}) == []


def test_the_faults_of_an_instance_are_its_own(state: ModuleType) -> None:
    specs = {
        "web1": {"memory_mb": 512, "vcpus": "2", "absent": 1},
        "db1": 5,
        "good": {
            "memory_mib": 512,
            "disks": [{"path": "/dev/vg0/x"}, {"name": "data", "size_mib": 64}],
        },
        "disk": {"disks": [{"path": "/x", "formt": "raw"}, {}, 5]},
        "7": {"nics": {}},
    }
    brine = {"instance": {"instances": specs}, "instances": {"web2": {"primary_nod": 5}, "x": 5}}
    assert of_brine(state, brine) == []

    def of(name: str) -> list[str]:
        return faults(state, {"brine": brine}, instance=name)

    assert of("good") == []
    assert of("web1") == [
        "brine:instance:instances:web1:memory_mb: there is no such key; the nearest is memory_mib",
        (
            "brine:instance:instances:web1:vcpus: must be a whole number, but is a string; "
            "leave out the quotes"
        ),
        "brine:instance:instances:web1:absent: must be true or false, but is a whole number",
    ]
    assert of("db1") == ["brine:instance:instances:db1: must be a mapping, but is a whole number"]
    assert of("disk") == [
        "brine:instance:instances:disk:disks:0:formt: there is no such key; the nearest is format",
        "brine:instance:instances:disk:disks:1: has neither path nor size_mib",
        "brine:instance:instances:disk:disks:2: must be a mapping, but is a whole number",
    ]
    assert of("7") == ["brine:instance:instances:7:nics: must be a list, but is a mapping"]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"instance": True, "hotplug": True, "storage": True, "watcher": True}, None),
        ({"hotplug": False}, None),
        (
            {"instance": True, "hotplug": False, "storage": True},
            ("instance", "hotplug"),
        ),
        (
            {"instance": True, "hotplug": True, "storage": False},
            ("instance", "storage"),
        ),
        (
            {"instance": False, "watcher": True},
            ("watcher", "instance"),
        ),
        (
            {"lifecycle": True},
            ("lifecycle", "instance"),
        ),
    ],
)
def test_parts_that_do_not_fit(
    state: ModuleType, parts: dict[str, bool], said: tuple[str, str] | None
) -> None:
    expected = []
    if said:
        text = f"brine-{said[0]}, which this node has or is to have, needs brine-{said[1]}"
        expected = [f"brine:{said[1]}:enabled: {text}"]
    assert faults(state, {}, parts=parts) == expected


def test_a_node_for_which_the_master_has_nothing_is_not_as_it_should_be(state: ModuleType) -> None:
    given: dict[str, Any] = {"distributed": {"fault": "the log of the Salt master says why"}}
    assert of_brine(state, given) == [
        "brine:distributed: could not be made: the log of the Salt master says why"
    ]
    # The one that makes the configuration may be what mends it.
    assert of_brine(state, {**given, "config": {"apply": True}}) == []


def test_a_formula_without_its_schema_is_told(state: ModuleType) -> None:
    vars(state).update(
        __pillar__={}, __salt__={"cp.cache_file": lambda *_, **__: ""}, __env__="base"
    )
    result = state.valid("pillar")
    assert result["result"] is False
    assert "there is no salt://brine/schema.json" in result["comment"]


def test_what_the_manual_declares_is_valid(state: ModuleType) -> None:
    """The schema of the cluster's sections is the one that `brine config apply` goes by."""
    manual = Path(EXAMPLE.parents[1], "docs/man/brine-config.data.5.rst").read_text()
    block = re.search(r"::\n\n((?: {4}.*\n|\n)+)", manual)
    assert block
    declared = json.loads(block[1])
    apply(None, declared)
    assert of_brine(state, declared) == []
    for section in ("nodes", "nodegroups", "disks", "networks"):
        whole: dict[str, Any] = {}
        fill(section, whole)
        assert of_brine(state, {section: {"x": {**whole, "unknown": None}}}) == []
    fill("cluster", whole := {})
    assert of_brine(state, {"cluster": whole}) == []


@pytest.mark.parametrize("key", ["on", "100", "null", "1.5", "2026-05-04"])
@pytest.mark.parametrize(
    "where", ["instance:instances", "instances", "nodes", "networks", "kvmd", "hotplug:scripts", ""]
)
def test_a_key_that_yaml_makes_no_string_of_is_refused(
    state: ModuleType, where: str, key: str
) -> None:
    (inner,) = yaml.safe_load(f"{{{key}: {{}}}}")
    pillar: Any = {inner: {}}
    for part in reversed(where.split(":") if where else []):
        pillar = {part: pillar}
    place = ":".join(filter(None, ["brine", where, str(inner)]))
    (fault,) = of_brine(state, pillar)
    assert fault.startswith(f"{place}: a key must be a string, but is ")
    assert fault.endswith("; put it in quotes")


@pytest.mark.parametrize("value", ["2026-05-04", "!!set {a}", "!!binary aGkK"])
def test_a_value_that_json_lacks_is_refused(state: ModuleType, value: str) -> None:
    given = yaml.safe_load(f"{{cluster: {{osparams: {{x: {{y: {value}}}}}, name: {value}}}}}")
    faults_found = of_brine(state, given)
    assert [fault.partition(": ")[0] for fault in faults_found] == [
        "brine:cluster:osparams:x:y",
        "brine:cluster:name",
    ]
    assert all(fault.endswith("; put it in quotes") for fault in faults_found)
