"""The parts of a configuration that every node gets: ssconf, and the files that it names."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from brine.common import paths
from brine.config import ssconf
from brine.config.model import Configuration
from brine.config.schema import ConfigError
from brine.config.ssconf import FileUse, Ssconf, SsconfError, extra_files
from brine.instance.disks.parameters import VolumeParameters, volume_parameters
from lab.ganeti_config import ganeti_config, instance_name, node_ip, node_name, uuid_of

Json = dict[str, Any]

WEB, DB = instance_name(1), instance_name(2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The values of a cluster of six nodes."""
    data = ganeti_config(nodes=6, instances=12)
    data["cluster"]["uid_pool"] = [[4000, 4099], [5000, 5000]]
    ssconf.write(tmp_path / "ssconf", ssconf.all_values(Configuration.from_json(data)))
    return tmp_path / "ssconf"


def test_every_value_is_in_a_file_of_its_own(folder: Path) -> None:
    def value(key: str) -> list[str]:
        return Ssconf(folder).value(key).split("\n")

    nodes = [node_name(number) for number in range(1, 7)]
    ips = [node_ip(number) for number in range(1, 7)]
    assert value("master_ip") == ["192.0.2.254"]
    assert value("master_netmask") == ["32"]
    assert value("node_list") == nodes
    assert value("master_candidates") == nodes[:4]
    assert value("master_candidates_ips") == ips[:4]
    assert value("offline_nodes") == nodes[5:]
    assert value("online_nodes") == nodes[:5]
    both = [f"{name} {ip}" for name, ip in zip(nodes, ips, strict=True)]
    assert value("node_primary_ips") == value("node_secondary_ips") == both
    assert value("node_vm_capable") == [f"{name}=True" for name in nodes]
    assert value("ssh_ports") == [f"{name}=22" for name in nodes]
    assert value("instance_list") == [instance_name(number) for number in range(1, 13)]
    assert value("nodegroups") == [f"{uuid_of('nodegroup', 1)} default"]
    assert value("hypervisor_list") == ["kvm"]
    assert value("primary_ip_family") == ["2"]
    assert value("enabled_user_shutdown") == ["True"]
    assert value("maintain_node_health") == ["False"]
    for empty in ("networks", "cluster_tags", "file_storage_dir"):
        assert value(empty) == [""]
    assert {"acpi=True", "migration_port=8102", "disk_cache=default"} <= {*value("hvparams_kvm")}
    assert "link=br0" in value("nicparams")
    values = Ssconf(folder)
    assert (values.cluster_name(), values.master_node()) == ("cluster.example.com", nodes[0])
    assert values.uid_pool() == [[4000, 4099], [5000, 5000]]
    # As Ganeti writes them.
    assert (folder / "ssconf_uid_pool").read_text() == "4000-4099\n5000\n"
    assert (folder / "ssconf_networks").read_bytes() == b""
    assert (folder / "ssconf_node_list").stat().st_mode & 0o777 == 0o644


def test_a_node_has_the_disk_parameters_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ganeti_config(nodes=2)
    data["cluster"]["diskparams"] = {"plain": {"stripes": 2, "stripesize": 64}}
    (group,) = data["nodegroups"].values()
    fast = {**group, "uuid": uuid_of("nodegroup", 2), "name": "fast"}
    fast["diskparams"] = {"plain": {"stripes": 4, "vg": "fast"}}
    data["nodegroups"][fast["uuid"]] = fast
    data["nodes"][uuid_of("node", 2)]["group"] = fast["uuid"]
    folder = tmp_path / "ssconf"
    ssconf.write(folder, ssconf.all_values(Configuration.from_json(data)))

    def of(node: str) -> dict[str, Any]:
        return Ssconf(folder).disk_params("plain", lambda name: name == node)

    assert of(node_name(1)) == {"stripes": 2, "stripesize": 64, "vg": "xenvg"}
    assert of(node_name(2)) == {"stripes": 4, "stripesize": 64, "vg": "fast"}
    assert of("another") == {"stripes": 1, "stripesize": 0, "vg": ""}
    monkeypatch.setattr(paths, "SSCONF_DIR", folder)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=node_name(2)))
    assert volume_parameters() == VolumeParameters(4, 64 << 10, "fast")
    file = folder / "ssconf_diskparams_plain"
    for text in ("stripes=x", "stripesize=65", "vg=/etc"):
        file.write_text(f"{node_name(1)} {text}\n")
        with pytest.raises(SsconfError, match=text.partition("=")[0]):
            of(node_name(1))
    file.unlink()
    assert volume_parameters() == VolumeParameters()


def test_only_what_changed_is_written(folder: Path) -> None:
    values = ssconf.all_values(Configuration.from_json(ganeti_config(nodes=6, instances=12)))
    (folder / "ssconf_hvparams_gone").touch()
    (folder / "ssconf_of_somebody_else").touch()
    before = (folder / "ssconf_node_list").stat().st_ino
    assert ssconf.changed_keys(folder, values) == ["hvparams_gone", "uid_pool"]
    assert ssconf.write(folder, values) == ["hvparams_gone", "uid_pool"]
    assert ssconf.write(folder, values) == []
    assert (folder / "ssconf_node_list").stat().st_ino == before
    assert not (folder / "ssconf_hvparams_gone").exists()
    assert (folder / "ssconf_of_somebody_else").exists()


@pytest.mark.parametrize(
    ("key", "data", "read"),
    [
        ("uid_pool", b"5-1\n", Ssconf.uid_pool),
        ("uid_pool", b"root\n", Ssconf.uid_pool),
        ("cluster_name", b"a\nb\n", Ssconf.cluster_name),
        ("cluster_name", b"a\0b\n", Ssconf.cluster_name),
        ("master_node", b"\xff\n", Ssconf.master_node),
    ],
)
def test_a_value_that_can_not_be_is_an_error_that_names_it(
    folder: Path, key: str, data: bytes, read: object
) -> None:
    (folder / f"ssconf_{key}").write_bytes(data)
    assert callable(read)
    with pytest.raises(SsconfError, match=f"^ssconf {key}: "):
        read(Ssconf(folder))


def test_a_value_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SsconfError, match="ssconf master_node: there is no"):
        Ssconf(tmp_path).master_node()


def test_a_folder_that_can_not_be_made_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "ssconf"
    folder.symlink_to(tmp_path / "not" / "there")
    with pytest.raises(SsconfError, match=f"can't be written in {folder}: File exists"):
        ssconf.write(folder, {"cluster_name": "x"})


def test_values_survive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(stat.S_ISDIR(os.fstat(fd).st_mode)))
    ssconf.write(tmp_path, {"cluster_name": "x", "master_ip": "192.0.2.1"})
    assert synced == [False, False, True]


def test_what_killed_writers_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    left, fresh = tmp_path / ".ssconf-new-abc", tmp_path / ".ssconf-new-def"
    for file in (left, fresh):
        file.write_text("half")
    yesterday = time.time() - 86400
    os.utime(left, (yesterday, yesterday))
    ssconf.write(tmp_path, {"cluster_name": "x"})
    assert not left.exists()
    assert fresh.exists()


# Files that every node needs besides the configuration.


@pytest.fixture
def data() -> Json:
    """A cluster of two hypervisors that names no file so far."""
    made = ganeti_config()
    made["cluster"]["enabled_hypervisors"] = ["kvm", "xen-hvm"]
    made["cluster"]["hvparams"]["xen-hvm"] = {}
    return made


def instance(data: Json, number: int) -> Json:
    found: Json = data["instances"][uuid_of("instance", number)]
    return found


def named_files(data: Json) -> list[str]:
    return list(extra_files(Configuration.from_json(data)))


def test_all_levels_name_files_each_is_once_and_sorted(data: Json) -> None:
    cluster = data["cluster"]
    cluster["hvparams"]["kvm"]["vnc_password_file"] = "/etc/brine/vnc"
    cluster["hvparams"]["xen-hvm"]["vnc_password_file"] = "/etc/brine/vnc"
    cluster["os_hvp"] = {"windows": {"kvm": {"spice_password_file": "/etc/brine/spice"}}}
    instance(data, 1)["hvparams"] = {
        "vnc_password_file": "/etc/brine/a-web",
        "vnc_x509_path": "/etc/pki/vnc",
    }
    instance(data, 2)["hvparams"] = {"vnc_password_file": "/etc/brine/vnc"}
    files = extra_files(Configuration.from_json(data))
    assert list(files) == ["/etc/brine/a-web", "/etc/brine/spice", "/etc/brine/vnc", "/etc/pki/vnc"]
    vnc = "vnc_password_file"
    assert files["/etc/brine/vnc"] == [
        FileUse(f"/cluster/hvparams/kvm/{vnc}", None, "kvm", vnc),
        FileUse(f"/cluster/hvparams/xen-hvm/{vnc}", None, "xen-hvm", vnc),
        FileUse(f"/instances/{DB}/hvparams/{vnc}", DB, "kvm", vnc),
    ]
    assert files["/etc/brine/spice"] == [
        FileUse(
            "/cluster/os_hvp/windows/kvm/spice_password_file", None, "kvm", "spice_password_file"
        )
    ]
    assert files["/etc/brine/a-web"] == [
        FileUse(f"/instances/{WEB}/hvparams/{vnc}", WEB, "kvm", vnc)
    ]


@pytest.mark.parametrize(
    ("hypervisor", "parameter"),
    [
        *((name, "vnc_password_file") for name in ("xen-pvm", "lxc", "unknown")),
        ("xen-hvm", "spice_password_file"),
    ],
)
def test_only_hypervisors_that_have_the_parameter_count(
    data: Json, hypervisor: str, parameter: str
) -> None:
    values = {parameter: "/etc/brine/password"}
    data["cluster"]["enabled_hypervisors"].append(hypervisor)
    data["cluster"]["hvparams"][hypervisor] = dict(values)
    instance(data, 1).update(hypervisor=hypervisor, hvparams=dict(values))
    assert named_files(data) == []


def test_a_hypervisor_that_is_not_enabled_needs_nothing(data: Json) -> None:
    data["cluster"]["hvparams"]["xen-hvm"]["vnc_password_file"] = "/etc/brine/vnc"
    assert named_files(data) == ["/etc/brine/vnc"]
    data["cluster"]["enabled_hypervisors"] = ["kvm"]
    assert named_files(data) == []


@pytest.mark.parametrize("nothing", ["", None, 5, ["/x"]])
def test_what_names_no_file_is_passed_over(data: Json, nothing: object) -> None:
    instance(data, 1)["hvparams"] = {"vnc_password_file": nothing}
    assert named_files(data) == []


@pytest.mark.parametrize("path", ["/etc/a\n/etc/shadow", "/etc/a\0b", "/etc/\x1b[2J"])
def test_a_path_that_would_print_as_something_else_is_refused(data: Json, path: str) -> None:
    instance(data, 1)["hvparams"] = {"vnc_password_file": path}
    with pytest.raises(ConfigError, match="is no path of a file") as caught:
        named_files(data)
    assert caught.value.where == f"/instances/{WEB}/hvparams/vnc_password_file"
    assert "\n" not in str(caught.value)
