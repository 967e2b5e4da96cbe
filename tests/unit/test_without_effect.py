"""Each key and parameter of a configuration either changes what Brine does, or is named as without
effect."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from brine.common.errors import BrineError
from brine.common.schema import shape_of
from brine.confd.answers import Answers
from brine.confd.protocol import RequestType
from brine.config import params, ssconf
from brine.config.apply import apply
from brine.config.effect import in_one_line, without_effect
from brine.config.merge import CLASSES
from brine.config.model import Configuration
from brine.instance.from_config import spec_of
from lab.ganeti_config import ganeti_config, instance_ip, instance_name, node_name, uuid_of

pytestmark = pytest.mark.usefixtures("own_node")

NODE, GROUP, WEB1, DISK = (uuid_of(kind, 1) for kind in ("node", "nodegroup", "instance", "disk"))
NETWORK = uuid_of("network", 1)
IDENTITY = {"uuid", "serial_no", "ctime", "mtime", "name", "cluster_name"}
OF_A_CHANGE = {
    # What only apply goes by, when it makes or changes objects.
    *("/cluster/candidate_pool_size", "/cluster/mac_prefix", "/cluster/volume_group_name"),
    *("/nodes/master_capable", "/nodegroups/networks", "/networks/mac_prefix"),
    # What must fit the rest, or verify finds a fault.
    *("/networks/network", "/nic/network", "/disks/children", "/disks/nodes"),
    *("/disks/forthcoming", "/instances/forthcoming", "/nodes/group"),
}
PATHS: dict[str, tuple[str, ...]] = {
    "cluster": ("cluster",),
    "nodes": ("nodes", uuid_of("node", 2)),
    "nodegroups": ("nodegroups", GROUP),
    "networks": ("networks", NETWORK),
    "nic": ("instances", WEB1, "nics", "0"),
    "disks": ("disks", DISK),
    "instances": ("instances", WEB1),
}


@pytest.fixture
def whole() -> dict[str, Any]:
    """A configuration with an object of each kind."""
    data = ganeti_config(nodes=2, instances=1)
    data["networks"][NETWORK] = {
        **{key: data["nodes"][NODE][key] for key in ("serial_no", "ctime", "mtime")},
        "uuid": NETWORK,
        "name": "lan",
        "network": "10.0.0.0/24",
        "tags": [],
    }
    data["instances"][WEB1]["hvparams"] = {"kernel_path": "/k", "vnc_bind_address": "::1"}
    data["instances"][WEB1]["disk_template"] = "plain"
    data["cluster"]["enabled_user_shutdown"] = False
    return data


def seen(data: dict[str, Any]) -> Any:
    """All that follows from a configuration, as JSON."""
    configuration = Configuration.from_json(copy.deepcopy(data))
    found: list[Any] = [ssconf.all_values(configuration)]
    for instance in configuration.instances.values():
        try:
            found.append(spec_of(configuration, instance)[0])
        except BrineError as error:
            found.append(str(error))
    answers = Answers(configuration)
    queries: tuple[Any, ...] = (None, instance_name(1), node_name(2), instance_ip(1))
    for request in RequestType:
        found += [answers.answer(request, query) for query in (*queries, {"0": node_name(1)})]
    for one in found[1:2]:
        one.pop("ignored", None) if isinstance(one, dict) else None
    return json.loads(json.dumps(found, default=str))


def named(data: dict[str, Any]) -> list[str]:
    return list(without_effect(data, Configuration.from_json(copy.deepcopy(data))))


def others(value: Any) -> Iterator[Any]:
    """Other values than this one, of its type."""
    if isinstance(value, bool):
        yield from (True, False)
    elif isinstance(value, int | float):
        yield value + 1
        yield 10
    elif isinstance(value, list | tuple):
        yield from (["other"], ["other", "volume"], [7000], [[4000, 4001]])
    elif isinstance(value, dict):
        yield {"other": {"other": "x"}}
        yield {"other": "x"}
    else:
        yield from ("other", "/other", "down", "user", "ro", "xen-pvm", "file", "192.0.2.77")
        yield from (NODE, "disabled", "tablet", "ignore")
    if value is None:
        yield from (7, 5910, ["other"], {"other": "x"})


def acts(
    data: dict[str, Any], key: str, put: Callable[[dict[str, Any], Any], object], value: Any
) -> str:
    """``used``, ``named`` or neither: what becomes of other values of a key or a parameter."""
    before = seen(data)
    for other in others(value):
        changed = copy.deepcopy(data)
        put(changed, other)
        if changed == data:
            continue
        try:
            after = seen(changed)
        except (BrineError, AttributeError, LookupError, TypeError, ValueError):
            continue  # a value that can't be there
        if after != before:
            return "used"
        if any(key in place.split("/") for place in (*named(data), *named(changed))):
            return "named"
    return "neither"


def keys() -> Iterator[tuple[str, str]]:
    nested = {"hvparams", "beparams", "nicparams", "ndparams", "os_hvp", "nics", "disks"}
    apart = {"present", "extra"} | IDENTITY
    for kind, cls in CLASSES.items():
        for field in dataclasses.fields(cls):
            key = field.metadata.get("key") or field.name
            if field.name not in apart and key not in nested | apart:
                yield kind, key


@pytest.mark.parametrize(("kind", "key"), [*keys()])
def test_each_key_is_used_or_named(whole: dict[str, Any], kind: str, key: str) -> None:
    def put(data: dict[str, Any], value: Any) -> None:
        place: Any = data
        for part in PATHS[kind]:
            place = place[int(part) if isinstance(place, list) else part]
        place[key] = value

    value = shape_of(CLASSES[kind]).by_key[key].default
    expected = {"neither", "used"} if f"/{kind}/{key}" in OF_A_CHANGE else {"used", "named"}
    assert acts(whole, key, put, value) in expected


def parameters() -> Iterator[tuple[str, str]]:
    for hypervisor, component in params.HYPERVISORS.items():
        yield from ((hypervisor, name) for name in component)


@pytest.mark.parametrize(("hypervisor", "name"), [*parameters()])
def test_each_hypervisor_parameter_is_used_or_named(
    whole: dict[str, Any], hypervisor: str, name: str
) -> None:
    instance = whole["instances"][WEB1]
    instance |= {"hypervisor": hypervisor}
    if hypervisor not in ("kvm", "xen-pvm"):
        instance["hvparams"] = {}
    elif name.startswith("bootloader"):
        instance["hvparams"]["use_bootloader"] = True

    def put(data: dict[str, Any], value: Any) -> None:
        data["instances"][WEB1]["hvparams"][name] = value
        if name == "security_domain":
            data["instances"][WEB1]["hvparams"]["security_model"] = "user"

    default = params.HYPERVISORS[hypervisor][name].default
    assert acts(whole, name, put, default) in ("used", "named")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        *(("beparams", name) for name in params.BACKEND),
        *(("ndparams", name) for name in params.NODE),
        *(("nicparams", name) for name in params.NIC),
    ],
)
def test_each_parameter_of_the_cluster_is_used_or_named(
    whole: dict[str, Any], key: str, name: str
) -> None:
    component = {"beparams": params.BACKEND, "ndparams": params.NODE, "nicparams": params.NIC}[key]

    def put(data: dict[str, Any], value: Any) -> None:
        where = data["cluster"].setdefault(key, {})
        (where if key == "ndparams" else where.setdefault("default", {}))[name] = value
        for instance in data["instances"].values():
            instance.get(key, {}).pop(name, None)

    assert acts(whole, name, put, component[name].default) in ("used", "named")


@pytest.mark.parametrize("level", [("cluster",), ("nodegroups", GROUP)])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, component in params.DISKS.items() for name in component],
)
def test_each_parameter_of_disks_is_used_or_named(
    whole: dict[str, Any], level: tuple[str, ...], kind: str, name: str
) -> None:
    def put(data: dict[str, Any], value: Any) -> None:
        place = data
        for part in level:
            place = place[part]
        place["diskparams"] = {kind: {name: value}}

    used = (kind, name) in {("plain", "stripes"), ("plain", "stripesize"), ("plain", "vg")}
    default = params.DISKS[kind][name].default
    assert acts(whole, name, put, default) == ("used" if used else "named")


def test_a_spec_and_an_input_name_the_same_of_an_instance(whole: dict[str, Any]) -> None:
    more = {"vga": "std", "keymap": "de", "initrd_path": "/i"}
    whole["instances"][WEB1]["hvparams"] |= more
    whole["cluster"]["hvparams"]["kvm"]["migration_port"] = 9000
    whole["instances"][WEB1] |= {"os": "debian", "osparams": {"a": "b"}}
    whole["instances"][WEB1]["beparams"] = {"minmem": 64, "maxmem": 512}
    whole["disks"][DISK]["params"] = {"stripes": 2}
    configuration = Configuration.from_json(copy.deepcopy(whole))
    data, ignored = spec_of(configuration, configuration.instances[WEB1])
    assert data["ignored"] == ignored
    assert set(ignored) == {
        *("vga", "keymap", "migration_port"),
        *("minmem", "os", "osparams", "disks/0/params"),
    }
    # Without a kernel an initial RAM disk has no effect.
    del whole["instances"][WEB1]["hvparams"]["kernel_path"]
    configuration = Configuration.from_json(whole)
    assert "initrd_path" in spec_of(configuration, configuration.instances[WEB1])[1]


def test_an_apply_names_each_and_what_is_usual_is_not_named() -> None:
    declared: dict[str, Any] = {
        "cluster": {"name": "c", "maint_balance": True, "hvparams": {"kvm": {"vga": "std"}}},
        "nodes": {"n1.example.com": {"primary_ip": "192.0.2.1"}},
        "instances": {
            f"web{n}.example.com": {"primary_node": "n1.example.com", "os": "debian"}
            for n in (1, 2)
        },
    }
    applied = apply(None, declared)
    assert applied.without_effect == (
        "/cluster/maint_balance",
        "/cluster/hvparams/kvm/vga",
        "/instances/web1.example.com/os",
        "/instances/web2.example.com/os",
    )
    line = "/cluster/maint_balance, /cluster/hvparams/kvm/vga, /instances/*/os (2)"
    assert in_one_line(list(applied.without_effect)) == line
    declared["cluster"] |= {"maint_balance": False, "hvparams": {"kvm": {"vga": ""}}}
    for instance in declared["instances"].values():
        instance["os"] = "noop"
    assert not apply(applied.new, declared).without_effect
