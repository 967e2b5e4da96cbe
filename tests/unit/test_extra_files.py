"""``brine config extra-files``: what every node needs besides the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli
from brine.common.cli import EntryPoint
from brine.config.model import Configuration
from brine.config.schema import ConfigError
from brine.config.ssconf import FileUse, extra_files
from lab.ganeti_config import ganeti_config, instance_name, uuid_of

Json = dict[str, Any]

WEB, DB = instance_name(1), instance_name(2)


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


def paths(data: Json) -> list[str]:
    return list(extra_files(Configuration.from_json(data)))


def test_a_cluster_may_name_none(data: Json) -> None:
    assert paths(data) == []


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


@pytest.mark.parametrize("hypervisor", ["xen-pvm", "lxc", "unknown"])
def test_only_hypervisors_that_have_the_parameter_count(data: Json, hypervisor: str) -> None:
    values = {"vnc_password_file": "/etc/brine/vnc"}
    data["cluster"]["enabled_hypervisors"].append(hypervisor)
    data["cluster"]["hvparams"][hypervisor] = dict(values)
    instance(data, 1).update(hypervisor=hypervisor, hvparams=dict(values))
    assert paths(data) == []


def test_xen_has_no_spice(data: Json) -> None:
    data["cluster"]["hvparams"]["xen-hvm"]["spice_password_file"] = "/etc/brine/spice"
    assert paths(data) == []


def test_a_hypervisor_that_is_not_enabled_needs_nothing(data: Json) -> None:
    data["cluster"]["hvparams"]["xen-hvm"]["vnc_password_file"] = "/etc/brine/vnc"
    assert paths(data) == ["/etc/brine/vnc"]
    data["cluster"]["enabled_hypervisors"] = ["kvm"]
    assert paths(data) == []


@pytest.mark.parametrize("nothing", ["", None, 5, ["/x"]])
def test_what_names_no_file_is_passed_over(data: Json, nothing: object) -> None:
    instance(data, 1)["hvparams"] = {"vnc_password_file": nothing}
    assert paths(data) == []


@pytest.mark.parametrize("path", ["/etc/a\n/etc/shadow", "/etc/a\0b", "/etc/\x1b[2J"])
def test_a_path_that_would_print_as_something_else_is_refused(data: Json, path: str) -> None:
    instance(data, 1)["hvparams"] = {"vnc_password_file": path}
    with pytest.raises(ConfigError, match="is no path of a file") as caught:
        paths(data)
    assert caught.value.where == f"/instances/{WEB}/hvparams/vnc_password_file"
    assert "\n" not in str(caught.value)


def test_the_command_prints_a_line_each(
    data: Json,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    entry = EntryPoint("config", "brine.config.cli:COMMAND")
    monkeypatch.setattr(cli, "entry_points", lambda _group: [entry])
    data["cluster"]["hvparams"]["kvm"]["vnc_x509_path"] = "/etc/pki/vnc"
    instance(data, 1)["hvparams"] = {"vnc_password_file": "/etc/brine/web"}
    file = tmp_path / "config.data"
    file.write_text(json.dumps(data))
    extra = ["config", "--config", str(file), "extra-files"]

    assert cli.main(extra) == 0
    assert capsys.readouterr().out == "/etc/brine/web\n/etc/pki/vnc\n"
    assert cli.main([*extra, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "path": "/etc/brine/web",
            "used_by": [
                {
                    "pointer": f"/instances/{WEB}/hvparams/vnc_password_file",
                    "instance": WEB,
                    "hypervisor": "kvm",
                    "parameter": "vnc_password_file",
                }
            ],
        },
        {
            "path": "/etc/pki/vnc",
            "used_by": [
                {
                    "pointer": "/cluster/hvparams/kvm/vnc_x509_path",
                    "instance": None,
                    "hypervisor": "kvm",
                    "parameter": "vnc_x509_path",
                }
            ],
        },
    ]
