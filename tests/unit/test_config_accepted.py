"""What ``brine config apply`` accepts, no later step refuses: ssconf, or a node's definition."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from brine.common.schema import KeySchema
from brine.config import params, ssconf
from brine.config.apply import InputError, apply
from brine.config.model import Configuration
from brine.config.verify import find_mistakes
from brine.instance.definition import SpecInput, define_several
from brine.instance.from_config import spec_of

pytestmark = pytest.mark.usefixtures("own_node")

Json = dict[str, Any]

WEB, OTHER, DOMAIN = "web1.example.com", "web2.example.com", "dom1.example.com"
DEVICES: Json = {
    "nics": [{"ip": "10.0.0.5"}, {"mac": "aa:00:00:11:22:33"}],
    "disks": [{"size": 1024}, {"size": 1024, "mode": "ro"}],
}
BASE: Json = {
    "cluster": {
        "name": "prod.example.com",
        "volume_group_name": "vg0",
        "nicparams": {"link": "br0"},
        "enabled_hypervisors": ["kvm", "xen-pvm"],
    },
    "nodes": {
        "node1.example.com": {"primary_ip": "192.0.2.1"},
        "node2.example.com": {"primary_ip": "192.0.2.2"},
    },
    "instances": {
        WEB: {"primary_node": "node1", **DEVICES},
        DOMAIN: {"primary_node": "node1", "hypervisor": "xen-pvm", "disks": [{"size": 1}]},
    },
}
BASE["cluster"]["master"] = "node1.example.com"

TEXTS = [
    *("", "x", "x y", "'", "-", "a,b", "root", "none", "user", "ide", "native", "/", "//x/../y"),
    *("../../x", "/x\n", "x\n", "/x\0", "\x1b[31m", "\u00e9", "\u200b", "100", ".100:200", "5000"),
    *("0.0.0.0", "fe80::1%eth0", "::1", "/run/vnc/", "q35", "routed", "openvswitch", "disabled"),
    *("x" * 5000, "x" * 16, "1.2.3.4/24", "\ud800", None),
]
NUMBERS = [-1, 0, 1, 2, 3, 255, 256, 257, 1024, 1025, 2000, 10001, 2**32, 2**32 + 1, 2**63]
OTHERS = [True, False, 1.5, [], {}, ["x"], 10**3999]


def edge_values(key: KeySchema) -> list[Any]:
    """Values of a parameter that are just right, just wrong, or of another type."""
    of_type = {bool: [], int: NUMBERS, str: [*key.limits.get("choices", ()), *TEXTS]}
    found = [one for kind, values in of_type.items() if kind in key.kinds for one in values]
    return [*{(type(one), str(one)): one for one in (key.default, *found, *OTHERS)}.values()]


def cases() -> Iterator[Any]:
    """Each parameter of each component, at the level of the cluster and that of an instance."""
    for kind, component in params.DISKS.items():
        for parameter, key in component.items():
            where = ("cluster", "diskparams", kind, parameter)
            yield pytest.param(where, key, id="/".join(where))
    for hypervisor, name in (("kvm", WEB), ("xen-pvm", DOMAIN)):
        for parameter, key in params.HYPERVISORS[hypervisor].items():
            places: list[tuple[str, ...]] = [
                ("cluster", "hvparams", hypervisor),
                ("instances", name, "hvparams"),
            ]
            for place in places[:1] if parameter in params.GLOBAL_HYPERVISOR else places:
                yield pytest.param((*place, parameter), key, id="/".join((*place, parameter)))
    devices: list[tuple[Any, ...]]
    for component, parts in ((params.BACKEND, "beparams"), (params.NIC, "nicparams")):
        for parameter, key in component.items():
            devices = [("cluster", parts)]
            devices += [("instances", WEB, *(("nics", 0) if parts == "nicparams" else ()), parts)]
            for place in devices:
                yield pytest.param((*place, parameter), key, id="/".join(map(str, place)))


def put(declared: Json, place: tuple[Any, ...], value: Any) -> Json:
    """A copy of an input with one value."""
    made = copy.deepcopy(declared)
    inner: Any = made
    for part in place[:-1]:
        inner = inner[part] if isinstance(inner, list) else inner.setdefault(part, {})
    inner[place[-1]] = value
    return made


def expect_use(new: Configuration) -> None:
    """Have a configuration pass all later steps."""
    assert find_mistakes(new) == []
    text = new.format()
    assert Configuration.parse(text).format() == text
    ssconf.all_values(new)
    ssconf.extra_files(new)
    for node in new.nodes:
        ours = [one for one in new.instances.values() if one.primary_node == node]
        given = [SpecInput(one.name, one.name, spec_of(new, one)[0]) for one in ours]
        for result in define_several(given, dry_run=True):
            assert result.error is None, str(result.error)


def tried(declared: Json, current: Configuration | None = None) -> bool:
    """Whether an input is accepted; then it passes all later steps."""
    try:
        applied = apply(current, declared)
    except InputError as error:
        assert all(mistake.where.startswith("/") for mistake in error.mistakes)
        assert str(error).isprintable() or len(error.mistakes) > 1
        return False
    expect_use(applied.new)
    return True


@pytest.fixture(scope="module")
def base() -> Configuration:
    """A cluster of two nodes, with an instance of each kind."""
    return apply(None, BASE).new


def test_the_base_is_accepted(base: Configuration) -> None:
    expect_use(base)


@pytest.fixture(scope="module")
def alone() -> dict[str, Configuration]:
    """That cluster with one instance, by its hypervisor: that of another does not see its
    parameters, and each instance more takes its time at each value."""
    return {
        hypervisor: apply(None, BASE | {"instances": {name: BASE["instances"][name]}}).new
        for hypervisor, name in (("kvm", WEB), ("xen-pvm", DOMAIN))
    }


@pytest.mark.parametrize(("place", "key"), [*cases()])
def test_a_parameter_that_is_accepted_is_used(
    base: Configuration,
    alone: dict[str, Configuration],
    place: tuple[Any, ...],
    key: KeySchema,
) -> None:
    of_all = place[:2] in (("cluster", "beparams"), ("cluster", "nicparams"))
    base = base if of_all else alone["xen-pvm" if {DOMAIN, "xen-pvm"} & {*place} else "kvm"]
    top = place[:2] if place[0] == "instances" else place[:1]
    part = {"nics": copy.deepcopy(DEVICES["nics"])} if "nics" in place else {}
    outcomes = {
        tried(put(put({}, top, dict(part)), place, value), base) for value in edge_values(key)
    }
    assert outcomes == {True, False}


BAD_OF_DISKS: dict[str, dict[str, list[Any]]] = {
    "plain": {
        "stripes": [0, -1, 129, "2", True],
        "stripesize": [-4, 2, 65, 1 << 21, "64"],
        "vg": ["../vg", "a b", ".."],
        "metavg": ["../vg", "a b", 5],
    },
    "drbd": {
        "c-delay-target": [0, 101],
        "c-fill-target": [-1, 1 << 21],
        "c-max-rate": [0, -1, 1 << 23],
        "c-min-rate": [-1, 1 << 23],
        "c-plan-ahead": [-1, 301],
        "data-stripes": [0, 129],
        "disk-barriers": ["", "x", "nb", "bb", "b,d"],
        "disk-custom": ["--x 'y", 5],
        "dynamic-resync": ["yes", 1],
        "meta-barriers": ["n", 0],
        "meta-stripes": [0, 129],
        "metavg": ["", "a/b"],
        "net-custom": ["--x 'y", True],
        "protocol": ["", "D", "c"],
        "resync-rate": [0, -1, 1 << 23],
    },
    "rbd": {"access": ["", "kernel"], "pool": ["", "a/b", "a@b", "a b"]},
    "ext": {"access": ["", "kernel"]},
    "gluster": {
        "access": ["", "kernel"],
        "host": ["", "a b", "a/b", "1.2.3.4:5"],
        "port": [0, -1, 65536],
        "volume": ["", "a/b", "a b"],
    },
}


def test_each_parameter_of_disks_has_values_that_are_refused(base: Configuration) -> None:
    known = {kind: set(component) for kind, component in params.DISKS.items() if component}
    assert {kind: set(keys) for kind, keys in BAD_OF_DISKS.items()} == known
    accepted = [
        (kind, name, value)
        for kind, keys in BAD_OF_DISKS.items()
        for name, values in keys.items()
        for value in values
        if tried(cluster({"diskparams": {kind: {name: value}}}), base)
    ]
    unknown = [
        kind for kind in params.DISKS if tried(cluster({"diskparams": {kind: {"x": 1}}}), base)
    ]
    assert (accepted, unknown) == ([], [])


GOOD_OF_DISKS: Json = {
    "drbd": {"disk-barriers": "bf", "protocol": "A", "c-plan-ahead": 0, "net-custom": "--x 'a b'"},
    "rbd": {"access": "userspace", "pool": "vms.fast-1"},
    "gluster": {"host": "gluster1.example.com", "volume": "gv_1", "port": 24008},
    "ext": {"access": "userspace"},
}


def test_usual_values_of_all_disks_are_accepted(base: Configuration) -> None:
    assert tried(cluster({"diskparams": GOOD_OF_DISKS}), base)
    assert tried(cluster({"diskparams": {"gluster": {"host": "2001:db8::7"}}}), base)


def cluster(keys: Json) -> Json:
    return {"cluster": keys}


def kvm(parameters: Json) -> Json:
    return cluster({"hvparams": {"kvm": parameters}})


def web(keys: Json) -> Json:
    return {"instances": {WEB: keys}}


def domain(keys: Json) -> Json:
    return {"instances": {DOMAIN: keys}}


VNC = {"vnc_bind_address": "127.0.0.1"}
REFUSED: dict[str, Json] = {
    "a newline in a value of ssconf": kvm({"kernel_args": "quiet\n"}),
    "a newline in a tag": cluster({"tags": ["a\nb"]}),
    "a tag that can't be printed": web({"tags": ["a\u200b"]}),
    "a newline in a path": cluster({"file_storage_dir": "/srv\n"}),
    "a left-over parameter": kvm({"lxc_x": "a\nb"}),
    "a candidate's certificate": cluster({"candidate_certs": {"a": "b\n"}}),
    "more processors than there can be": web({"beparams": {"vcpus": 2000}}),
    "a topology of three": web({"beparams": {"vcpus": 4}, "hvparams": {"cpu_cores": 3}}),
    "a relative path": web({"hvparams": {"kernel_path": "vmlinuz"}}),
    "a URL": web({"hvparams": {"cdrom_image_path": "http://x/y.iso"}}),
    "a model of a NIC": kvm({"nic_type": "foo"}),
    "a path as link": cluster({"nicparams": {"link": "../../x"}}),
    "an unbalanced quote": kvm({"kvm_extra": "-name 'x"}),
    "a user without a name": kvm({"security_model": "user"}),
    "root": kvm({"security_model": "user", "security_domain": "root"}),
    "read-only and IDE": kvm({"disk_type": "ide"}),
    "native and a cache": kvm({"disk_aio": "native", "disk_cache": "writeback"}),
    "the node twice": web({"secondary_nodes": ["node1.example.com"]}),
    "a long name": {"instances": {"x" * 64: {"primary_node": "node1"}}},
    "a name of systemd's": {"instances": {"_x": {"primary_node": "node1"}}},
    "a name that is a UUID": {
        "instances": {"6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f": {"primary_node": "node1"}}
    },
    "a low port": web({"network_port": 80, "hvparams": VNC}),
    "a long path of a socket": kvm({"vnc_bind_address": f"/{'x' * 107}"}),
    "a long path with a name": web({"hvparams": {"vnc_bind_address": f"/{'x' * 86}/"}}),
    "a port that is none": web({"network_port": 70000, "hvparams": VNC}),
    "a MAC address of zeroes": web({"nics": [{"mac": "00:00:00:00:00:00"}]}),
    "a routed NIC with a VLAN": web(
        {"nics": [{"ip": "10.0.0.5", "nicparams": {"mode": "routed", "vlan": "5"}}]}
    ),
    "a routed NIC of loopback": web(
        {"nics": [{"ip": "127.0.0.1", "nicparams": {"mode": "routed"}}]}
    ),
    "a routing table of Xen's": domain(
        {"nics": [{"ip": "10.0.0.5", "nicparams": {"mode": "routed", "link": "100"}}]}
    ),
    "a VLAN of Xen's": domain({"nics": [{"nicparams": {"vlan": "5"}}]}),
    "a filter of Xen's": domain({"nics": [{"nicparams": {"filter": True}}]}),
    "a filter of Open vSwitch's": web(
        {"nics": [{"nicparams": {"mode": "openvswitch", "filter": True}}]}
    ),
    "a domain of nothing": domain({"disks": []}),
    "a bootloader": domain({"hvparams": {"use_bootloader": True, "bootloader_path": "/b"}}),
    "too many disks": domain({"disks": [{"size": 1}] * 27}),
    "too many NICs": web({"nics": [{}] * 19}),
    "a kind of disk": web({"disks": [{"size": 1, "dev_type": "rbd", "logical_id": ["rbd", "x"]}]}),
    "a relative file": web(
        {"disks": [{"size": 1, "dev_type": "file", "logical_id": ["loop", "x"]}]}
    ),
    "no path": web({"disks": [{"size": 1, "dev_type": "file", "logical_id": ["loop"]}]}),
    "a way out": web({"disks": [{"size": 1, "logical_id": ["..", "etc"]}]}),
    "a number": web({"disks": [{"size": 1, "logical_id": ["vg0", 5]}]}),
    "a hypervisor": web({"hypervisor": "lxc"}),
    "a number of thousands of digits": cluster({"candidate_pool_size": 10**3999}),
    "no candidates": cluster({"candidate_pool_size": 0}),
    "a NUL": cluster({"volume_group_name": "a\0b"}),
    "a NUL in a key": cluster({"osparams": {"a\0b": {}}}),
    "a NUL in a list": cluster({"ipolicy": {"disk-templates": ["a\0"]}}),
    "half of a pair": cluster({"osparams": {"x": {"y": "\ud800"}}}),
    "osparams that are numbers": cluster({"osparams": {"x": {"y": 5}}}),
    "an instance's osparams": web({"osparams": {"y": True}}),
    "an instance's private ones": web({"osparams_private": {"y": None, "z": 1}}),
    "a netmask": cluster({"master_netmask": 129}),
    "a group of disk parameters": cluster({"diskparams": {"lvm": {"stripes": 2}}}),
    "a parameter of another kind": cluster({"diskparams": {"file": {"stripes": 2}}}),
    "no stripes": cluster({"diskparams": {"plain": {"stripes": 0}}}),
    "a volume group with a path": cluster({"diskparams": {"plain": {"vg": "../vg"}}}),
    "the cluster's volume group": cluster({"volume_group_name": "vg/0"}),
    "a port of DRBD": cluster({"tcpudp_port_pool": [70000]}),
}
ACCEPTED: dict[str, Json] = {
    "a topology that fits": web({"beparams": {"vcpus": 6}, "hvparams": {"cpu_cores": 3}}),
    "a user with one": kvm({"security_model": "user", "security_domain": "vm"}),
    "another node": web({"secondary_nodes": ["node2.example.com"]}),
    "a routed NIC": web(
        {"nics": [{"ip": "10.0.0.5", "nicparams": {"mode": "routed", "link": "main"}}]}
    ),
    "a routed NIC of Xen's": domain(
        {"nics": [{"ip": "10.0.0.6", "nicparams": {"mode": "routed", "link": "main"}}]}
    ),
    "a domain of a kernel": domain(
        {"disks": [], "hvparams": {"kernel_path": "/k", "initrd_path": "/i"}}
    ),
    "an initrd without a kernel": domain({"hvparams": {"initrd_path": "/i"}}),
    "a path of a socket that fits": web({"hvparams": {"vnc_bind_address": f"/{'x' * 85}/"}}),
    "many NICs": web({"nics": [{}] * 18}),
    "lines of an operating system": cluster({"osparams": {"x": {"y": "a\nb"}}}),
}


@pytest.mark.parametrize("declared", REFUSED.values(), ids=REFUSED)
def test_what_a_later_step_would_refuse_is_refused(base: Configuration, declared: Json) -> None:
    assert not tried(declared, base)


@pytest.mark.parametrize("declared", ACCEPTED.values(), ids=ACCEPTED)
def test_what_all_steps_accept_is_accepted(base: Configuration, declared: Json) -> None:
    assert tried(declared, base)


ONE = {"size": 1, "dev_type": "file", "logical_id": ["loop", "/srv/one"]}
SAME = ONE | {"logical_id": ["loop", "/srv//./one"]}


@pytest.mark.parametrize(
    ("first", "second", "accepted"),
    [
        ({"disks": [ONE]}, {"disks": [SAME]}, False),
        ({"disks": [ONE, SAME]}, {}, False),
        ({"disks": [ONE]}, {"disks": [SAME], "primary_node": "node2"}, True),
        ({"disks": [ONE | {"mode": "ro"}]}, {"disks": [SAME | {"mode": "ro"}]}, True),
        ({"disks": [ONE | {"mode": "ro"}, SAME | {"mode": "ro"}]}, {}, False),
        ({"disks": [ONE]}, {"disks": [SAME], "admin_state": "offline"}, False),
        (
            {"disks": [ONE], "admin_state": "offline"},
            {"disks": [SAME], "admin_state": "offline"},
            True,
        ),
        ({"disks": [ONE]}, {"hvparams": {"cdrom_image_path": "/srv/one"}}, False),
        ({"hvparams": {"cdrom_image_path": "/x"}}, {"hvparams": {"cdrom_image_path": "/x"}}, True),
        ({"hvparams": {"cdrom_image_path": "/x", "cdrom2_image_path": "/x"}}, {}, True),
    ],
)
def test_two_instances_of_a_node_share_what_both_only_read(
    base: Configuration, first: Json, second: Json, accepted: bool
) -> None:
    own = {"primary_node": "node1"}
    instances = {"web3.example.com": own | first, OTHER: own | second}
    assert tried({"instances": instances}, base) == accepted


def test_the_fault_of_a_nic_stays_its_own_where_another_goes(base: Configuration) -> None:
    first, second = (f"{number}2345678-0000-4000-8000-000000000000" for number in (1, 2))
    nics = [{"uuid": first}, {"uuid": second, "mac": "aa:00:00:11:22:35"}]
    data = apply(base, domain({"nics": nics})).new.to_json()
    (instance,) = (one for one in data["instances"].values() if one["name"] == DOMAIN)
    instance["nics"][1]["nicparams"] = {"vlan": "5"}
    faulty = Configuration.from_json(data)
    assert [one.where for one in find_mistakes(faulty)] == [
        f"/instances/{DOMAIN}/nics/1/nicparams/vlan"
    ]
    assert len(find_mistakes(apply(faulty, domain({"nics": [{"uuid": second}]})).new)) == 1


def test_devices_of_one_instance_differ_in_the_beginnings_of_their_uuids(
    base: Configuration,
) -> None:
    uuids = [f"12345678-0000-4000-8000-00000000000{number}" for number in (1, 2)]
    for key in ("nics", "disks"):
        devices = [{"uuid": uuid, **({"size": 1} if key == "disks" else {})} for uuid in uuids]
        assert not tried({"instances": {WEB: {key: devices}}}, base)
