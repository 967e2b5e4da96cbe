"""``brine instance``, as a person or a program uses it."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from brine.common import paths, process
from brine.common.cli import Parser
from brine.common.entry_points import EntryPoint
from brine.instance import console, operations, registry, store
from brine.instance.stop import Stopped
from brine.vm.arguments import instance_name
from brine.vm.files import InstanceFiles
from brine.vm.spec import Spec, to_json
from brine.vm.unit_name import unit_of
from lab.fake_qemu import FakeQemus
from lab.scripted_systemctl import ScriptedSystemctl

Run = Callable[..., tuple[int, str, str]]

UNIT = unit_of("web1")
RUNNING = {"ActiveState": "active", "MainPID": "4711", "InvocationID": "a" * 32}
FAILED = {"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "1"}


@pytest.fixture
def web1(brine: Run) -> Run:
    """The same, where web1 is defined."""
    assert brine("define", "-", stdin={"name": "web1"})[0] == 0
    return brine


def spec() -> dict[str, Any]:
    return to_json(store.load("web1"))


# A person's mistakes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: VERB"),
        (["lits"], "there is no brine instance lits"),
        (["list", "web1"], "unrecognized arguments: web1"),
        (["info"], "required: INSTANCE"),
        (["info", "web1", "--jsno"], "unrecognized arguments: --jsno"),
        (["define"], "no spec is named"),
        (["define", "a", "--from-config"], "several sources of specs are named"),
        (["define", "a", "--node", "n1"], "--node goes with --from-config"),
        (["define", "a", "--config", "b"], "--config goes with --from-config"),
        (["rename", "web1"], "required: NAME"),
        (["cdrom", "web1"], "medium"),
        (["cdrom", "web1", "/a", "--eject"], "medium"),
        (["cdrom", "web1", "/a", "--drive", "-1"], "must be from 0 to 99, but is '-1'"),
        (["log", "web1", "-n", "0"], "must be from 1 to 999999, but is '0'"),
        (["rename", "web1", "web1"], "that is its name already: web1"),
        (["start"], "which instance?"),
        (["start", "web1", "--all"], "--all, or that one?"),
        (["start", "--all", "--json"], "--json goes with names of instances"),
        (["stop"], "which instance?"),
        (["stop", "web1", "--all"], "--all, or that one?"),
        (["stop", "--all", "--parallel", "0"], "must be from 1 to 1000"),
        *(
            (
                ["stop", "web1", "--timeout", word],
                f"less than 1000000 seconds, but is '{word}'",
            )
            for word in ("0", "-1", "nan", "1e9", "soon")
        ),
        (["reboot", "web1", "--reset", "--force"], "--reset "),
        (
            ["reboot", "web1", "--reset", "--timeout", "5"],
            "--reset ",
        ),
    ],
)
def test_a_wrong_command_line_gets_one_line_and_a_hint(
    web1: Run, arguments: list[str], said: str
) -> None:
    status, out, err = web1(*arguments)
    assert (status, out) == (2, "")
    error, hint = err.splitlines()
    assert error.startswith("brine: error: ")
    assert said in error
    assert hint.startswith("brine: hint: ")


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        *(("ls", "list"), ("show", "info"), ("create", "define"), ("delete", "undefine")),
        *(("destroy", "stop --force"), ("kill", "stop --force"), ("modify", "set")),
        ("strat", "start"),
    ],
)
def test_a_verb_of_others_is_a_hint(web1: Run, said: str, meant: str) -> None:
    status, _, err = web1(said)
    assert (status, err.splitlines()[1]) == (2, f"brine: hint: did you mean {meant}?")


def test_a_spec_may_be_yaml_and_a_fault_names_file_and_line(web1: Run, tmp_path: Path) -> None:
    file = tmp_path / "db1.yaml"
    file.write_text("name: db1\nvcpus: 2\n")
    status, out, err = web1("define", str(file))
    assert (status, out, err) == (0, "defined: db1\n", "")
    for content, said in (
        ("name: db1\nvcpus: [\n", f"{file}: not valid YAML at line 3"),
        ("!!python/object/apply:os.system ['true']", f"{file}: not valid YAML at line 1"),
        ("name: db1\nvcpu: 2\n", f"{file}: /vcpu: there is no such key"),
        ("name: a\nvcpus: 1\nname: b\n", f"{file}: not valid YAML at line 3: the key name stands"),
        (
            "- name: a\n- name: b\n  5: 6\n",
            f"{file}: not valid YAML at line 3: a key must be a string",
        ),
        (
            "- name: a\n- ? [1, 2]\n  : 3\n",
            f"{file}: not valid YAML at line 2: a key must be a string",
        ),
    ):
        file.write_text(content)
        status, _, err = web1("define", str(file))
        assert status == 1
        assert said in err
    plain = tmp_path / "db1.json"
    plain.write_text('{"name": "db1",\n "vcpus": }')
    _, _, err = web1("define", str(plain))
    assert f"{plain}: not valid JSON at byte 26, line 2" in err
    plain.write_text('{"name": "db1",  # mine\n "vcpus": 2}')
    assert "name ends in .yaml" in web1("define", str(plain))[2].splitlines()[1]
    for data in (b"# mine\nname: db1\nvcpus: 2\n", b"name: db1\nvcpus: 2\n"):
        assert web1("define", "-", "--dry-run", stdin=data)[0] == 0
    assert "standard input: not valid YAML at line" in web1("define", "-", stdin=b"name: [\n")[2]


def test_all_that_is_wrong_with_a_name_is_told_in_one_line(web1: Run) -> None:
    for verb in ("info", "undefine", "start", "stop", "reboot", "console"):
        status, out, err = web1(verb, "wbe1")
        assert (status, out) == (1, "")
        assert err == (
            "brine: error: wbe1: there is no such instance\nbrine: hint: did you mean web1?\n"
        )
        status, _, err = web1(verb, "../web1")
        assert (status, len(err.splitlines())) == (1, 1)
        assert "a name begins with a letter or digit" in err


# list, info


@pytest.mark.parametrize("change", [str, str.upper])
def test_no_instance_takes_the_uuid_of_another_as_its_name(
    web1: Run, tmp_path: Path, change: Callable[[str], str]
) -> None:
    uuid = change(store.load("web1").uuid)
    assert web1("define", "-", stdin={"name": "web2"})[0] == 0
    image = tmp_path / "image"
    image.write_bytes(bytes(512))
    for arguments in (
        ("define", "-"),
        ("define", "--dry-run", "-"),
        ("rename", "web2", uuid),
        ("clone", "web2", uuid),
        ("import", image, "--name", uuid),
    ):
        status, _, said = web1(*arguments, stdin={"name": uuid})
        assert status == 1
        assert "form of a UUID" in said
    assert store.names() == ["web1", "web2"]


def test_one_that_has_such_a_name_already_keeps_it(web1: Run) -> None:
    name = str(uuid4())
    store.save(replace(store.load("web1"), name=name, uuid=str(uuid4()), nics=()))
    assert web1("define", "-", stdin={"name": name, "memory_mib": 999})[0] == 0
    assert web1("rename", name, "web9")[0] == 0
    assert store.names() == ["web1", "web9"]


def test_an_instance_is_known_by_its_uuid_too(web1: Run) -> None:
    uuid = spec()["uuid"]
    _, out, _ = web1("info", uuid.upper(), "--json")
    assert json.loads(out)["name"] == "web1"
    assert web1("stop", uuid)[1] == "unchanged: web1 does not run\n"
    # A name comes first: an instance may have another one's UUID as its name, from before.
    store.save(replace(store.load("web1"), name=uuid, uuid=str(uuid4())))
    assert json.loads(web1("info", uuid, "--json")[1])["name"] == uuid
    assert web1("undefine", uuid)[0] == 0
    assert web1("rename", uuid, "web2")[1] == "renamed: web1 to web2\n"
    assert web1("undefine", uuid)[1] == "undefined: web2\n"
    status, _, err = web1("info", uuid)
    assert (status, err.startswith(f"brine: error: {uuid}: there is no such instance")) == (1, True)


@pytest.mark.parametrize("part", ["hotplug", "instance", "kvmd", "lifecycle", "watcher"])
def test_each_verb_takes_a_uuid_where_it_takes_a_name(web1: Run, part: str) -> None:
    text = (Path(__file__).parents[2] / f"pkgs/{part}/pyproject.toml").read_text()
    taking = 0
    for line in text.partition("commands")[2].partition("\n\n")[0].splitlines():
        if " = " not in line:
            continue
        noun, module = line.replace('"', "").split(" = ")
        command = EntryPoint(noun, module).load()
        parser = Parser(prog=noun)
        command.configure(parser)
        for verb in _verbs_of(parser):
            for argument in verb._actions:
                if argument.metavar == "INSTANCE":
                    assert argument.type is instance_name, (verb.prog, argument.dest)
                    taking += 1
    assert taking


def _verbs_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def test_an_empty_node(brine: Run) -> None:
    assert brine("list") == (0, "no instance is defined\n", "")
    assert brine("list", "--json") == (0, "[]\n", "")


def test_list(web1: Run, systemctl: ScriptedSystemctl) -> None:
    systemctl.unit(UNIT, **RUNNING)
    web1("start", "web1")
    asked_before = len(systemctl.asked("show"))
    status, out, err = web1("list")
    assert len(systemctl.asked("show")) == asked_before + 1
    heading, line = out.splitlines()
    assert (status, err) == (0, "")
    assert heading.split()[:2] == ["NAME", "STATUS"]
    assert line.split() == ["web1", "running", "up", "running", "1024", "MiB", "1", "-"]
    (one,) = json.loads(web1("list", "--json")[1])
    assert (one["name"], one["status"], one["pid"]) == ("web1", "running", 4711)


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_a_damaged_spec_is_told_beside_the_others(web1: Run, json_too: list[str]) -> None:
    (paths.SPECS_DIR / "web2.json").write_text("{")
    status, out, err = web1("list", *json_too)
    assert status == 1
    assert "web1" in out
    error, hint = err.splitlines()
    assert error.startswith("brine: error: web2: ")
    assert hint.startswith("brine: hint: brine instance define writes it anew")


def test_info(web1: Run) -> None:
    status, out, err = web1("info", "web1")
    assert (status, err) == (0, "")
    assert "ADMIN_down" in out
    found = json.loads(web1("info", "web1", "--json")[1])
    assert found["spec"] == spec()
    assert found["status"] == "ADMIN_down"


def test_a_node_without_systemd(web1: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    said = "systemctl: No such file or directory\nbrine: hint: instances need systemd\n"
    for arguments in (["list"], ["info", "web1"], ["stop", "web1"]):
        status, _, err = web1(*arguments)
        assert (status, err) == (1, f"brine: error: {said}")
    assert web1("start", "web1")[2] == f"brine: error: web1: did not start: {said}"


# define


def test_define_says_what_it_did(brine: Run, tmp_path: Path, systemctl: ScriptedSystemctl) -> None:
    file = tmp_path / "web1.json"
    file.write_text(json.dumps({"name": "web1", "nics": [{"link": "br0"}]}))
    assert brine("define", str(file)) == (0, "defined: web1\n", "")
    assert brine("define", str(file)) == (0, "unchanged: web1\n", "")
    gone = f"removed from its spec: NIC {spec()['nics'][0]['mac']}\n"
    file.write_text(json.dumps({"name": "web1"}))
    assert brine("define", str(file), "--dry-run") == (
        0,
        f"would be defined: web1; would be {gone}",
        "",
    )
    assert len(spec()["nics"]) == 1
    assert brine("define", str(file)) == (0, f"defined: web1; {gone}", "")
    assert spec()["nics"] == []
    systemctl.unit(UNIT, **RUNNING)
    _, out, _ = brine("define", "-", stdin={"name": "web1", "vcpus": 2})
    assert out == "defined: web1; it runs, and has this from its next start on\n"


def test_define_for_programs(brine: Run) -> None:
    given = {"name": "web1", "nics": [{"link": "br0"}]}
    status, out, _ = brine("define", "-", "--json", "--dry-run", stdin=given)
    told = json.loads(out)
    assert (status, told["name"], told["changed"], told["dry_run"]) == (0, "web1", True, True)
    assert not paths.SPECS_DIR.exists()
    told = json.loads(brine("define", "-", "--json", stdin=given)[1])
    assert (told["changed"], told["dry_run"], told["spec"]) == (True, False, spec())
    told = json.loads(brine("define", "-", "--json", stdin=given)[1])
    assert (told["changed"], told["spec"]) == (False, spec())


def test_define_lists_the_devices_that_go(brine: Run) -> None:
    """Such as a NIC that was plugged in by hand during an earlier run, and is no hot change now."""
    mac = "52:54:00:11:22:33"
    whole = {"name": "web1", "nics": [{"link": "br0", "mac": mac}], "disks": [{"path": "/srv/a"}]}
    brine("define", "-", stdin=whole)
    less = {"name": "web1", "disks": whole["disks"]}
    status, output, _ = brine("define", "-", "--dry-run", "--json", stdin=less)
    assert (status, json.loads(output)["removed"]) == (0, [f"NIC {mac}"])
    status, output, _ = brine("define", "-", stdin=less)
    assert (status, output) == (0, f"defined: web1; removed from its spec: NIC {mac}\n")
    assert json.loads(brine("define", "-", "--json", stdin=less)[1])["removed"] == []


def test_a_list_of_specs_is_defined_and_a_bad_one_stops_no_other(brine: Run) -> None:
    given = [{"name": "web1"}, {"name": "web2", "vcpu": 2}, 5, {"name": "web1"}, {"name": "web3"}]
    status, out, err = brine("define", "-", stdin=given)
    assert (status, out) == (1, "defined: web1\ndefined: web3\n")
    errors = [line for line in err.splitlines() if ": error: " in line]
    assert [line.removeprefix("brine: error: ") for line in errors] == [
        "web2: /vcpu: there is no such key",
        "/2: must be an object, but is 5",
        "web1: /3/name: is there twice",
    ]
    status, out, err = brine(
        "define", "-", "--json", stdin=[*given[:3], {"name": "web3", "vcpus": 2}]
    )
    told = json.loads(out)
    web1, web2, nameless, web3 = told["instances"]
    assert (status, told["dry_run"], len(err.splitlines())) == (1, False, 3)
    assert (web1["changed"], web1["spec"], web1["before"]) == (False, spec(), spec())
    assert web2 == {
        "name": "web2",
        "error": "web2: /vcpu: there is no such key",
        "hint": "did you mean vcpus?",
    }
    assert (nameless["name"], nameless["error"]) == (None, "/2: must be an object, but is 5")
    assert (web3["changed"], web3["before"]["vcpus"], web3["spec"]["vcpus"]) == (True, 1, 2)
    nothing = '{"instances": [], "dry_run": false}\n'
    assert brine("define", "-", "--json", stdin=[]) == (0, nothing, "")


def test_a_user_who_has_shut_an_instance_down_is_not_overruled(brine: Run) -> None:
    brine("define", "-", stdin={"name": "web1"})
    store.save(replace(store.load("web1"), admin_state_source="user"))
    for given in ({"name": "web1", "admin_state": "up"}, {"name": "web1", "admin_state": "down"}):
        status, out, _ = brine("define", "-", "--keep-user-state", "--json", stdin=given)
        told = json.loads(out)
        assert (status, told["changed"], told["spec"]) == (0, False, told["before"])
    offline = {"name": "web1", "admin_state": "offline"}
    _, out, _ = brine("define", "-", "--keep-user-state", "--json", stdin=offline)
    assert json.loads(out)["spec"]["admin_state"] == "offline"


@pytest.mark.parametrize("names", [("web1", "web2"), ("web2", "web1")])
def test_an_instance_gets_the_disk_that_another_of_the_list_gives_up(
    brine: Run, names: tuple[str, str]
) -> None:
    disk, mac = {"path": "/dev/vg/data"}, {"link": "br0", "mac": "52:54:00:00:00:01"}
    brine("define", "-", stdin=[{"name": "web1", "disks": [disk], "nics": [mac]}, {"name": "web2"}])
    keys = {"web1": {}, "web2": {"disks": [disk], "nics": [mac]}}
    given = [{"name": name, **keys[name]} for name in names]
    for dry_run in (["--dry-run"], []):
        status, out, err = brine("define", "-", "--json", *dry_run, stdin=given)
        assert (status, err) == (0, "")
        rows = json.loads(out)["instances"]
        assert [(row["name"], row["changed"]) for row in rows] == [(name, True) for name in names]
    assert spec()["disks"] == []
    # Two that both want it are refused, also where none is stored yet.
    both = [{"name": name, "disks": [{"path": "/dev/vg/other"}]} for name in ("db1", "db2")]
    for dry_run in (["--dry-run"], []):
        status, out, _ = brine("define", "-", "--json", *dry_run, stdin=both)
        first, second = json.loads(out)["instances"]
        assert (status, first["changed"]) == (1, True)
        assert "/dev/vg/other is also a disk of db1" in second["error"]


def test_a_live_definition_tells_the_state_that_it_found(web1: Run) -> None:
    (found,) = json.loads(web1("list", "--json")[1])
    given = {"name": "web1", "vcpus": 3}
    said = json.loads(web1("define", "-", "--live", "--json", stdin=given)[1])
    assert said["state"].items() >= {key: found[key] for key in ("status", "why")}.items()


@pytest.mark.parametrize("live", [[], ["--live"]])
def test_an_image_that_is_being_built_has_no_systemd_to_ask(
    brine: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, live: list[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert brine("define", "-", *live, stdin={"name": "web1"}) == (0, "defined: web1\n", "")
    assert spec()["name"] == "web1"


def test_a_live_change_that_nobody_can_make_is_an_error(
    web1: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, qemus: FakeQemus
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))  # so systemd does not say that it runs
    qemus.start(paths.CONTROL_DIR / "web1.qmp")
    given = {"name": "web1", "nics": [{"link": "br0"}]}
    status, out, err = web1("define", "-", "--live", stdin=given)
    assert (status, out) == (1, "defined: web1\n")
    assert err.startswith("brine: error: web1: may run, and systemd does not tell")
    assert len(spec()["nics"]) == 1
    an_editor(tmp_path, monkeypatch, ":")
    status, out, err = web1("edit", "web1", "--live")
    assert (status, out) == (1, "unchanged: web1\n")
    assert err.startswith("brine: error: web1: may run, and systemd does not tell")


def test_a_broken_disk_stops_no_definition(brine: Run, tmp_path: Path) -> None:
    (tmp_path / "disk").symlink_to("/proc/self/mem")  # whose beginning can't be read
    disks = [{"path": str(tmp_path / "disk")}]
    given = [{"name": "web1", "disks": disks}, {"name": "web2"}]
    assert brine("define", "-", stdin=given) == (0, "defined: web1\ndefined: web2\n", "")
    said = "can't be read: Input/output error"
    expected = (1, "", f"brine: error: {tmp_path}/disk: {said}\n")
    assert brine("import", tmp_path / "disk") == expected


def test_what_the_system_refuses_one_instance_stops_no_other(
    brine: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(one: Spec, *_: object) -> None:
        if one.name == "web1":
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(registry, "refuse_other_formats", broken)
    status, out, err = brine("define", "-", "--json", stdin=[{"name": "web1"}, {"name": "web2"}])
    web1, web2 = json.loads(out)["instances"]
    assert (status, err) == (1, "brine: error: web1: the system: Input/output error\n")
    assert web1 == {"name": "web1", "error": "web1: the system: Input/output error", "hint": None}
    assert web2["changed"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (b"", "standard input: not valid JSON"),
        (b"{", "standard input: not valid JSON"),
        (b'{"name": "\xff"}', "standard input: not valid UTF-8"),
        (b"[" * 100_000, "standard input: not usable JSON: nested too deep"),
        (b'{"name": "web1", "name": "web2"}', "the key 'name' is twice in one object"),
        (b"5", "must be an object, but is 5"),
        (b"{}", "has no name"),
        (b'{"name": 5}', "/name: must be a string, but is 5"),
        (b'{"name": "a b"}', "a name begins with a letter or digit"),
        (b'{"name": "web1", "vcpu": 2}', "/vcpu: there is no such key"),
        (b'{"name": "web1", "nics": [{}]}', "/nics/0: a NIC that is bridged needs its bridge"),
        (b'{"name": "web1", "a\\n": 1}', r"/a\n: there is no such key"),
        (b'{"name": "web1", "\\ud800": 1}', "half of a surrogate pair is no character"),
    ],
)
def test_what_is_no_spec_is_told_in_one_line(brine: Run, given: bytes, said: str) -> None:
    status, out, err = brine("define", "-", stdin=given)
    assert (status, out) == (1, "")
    error, *hint = err.splitlines()
    assert error.startswith("brine: error: ")
    assert said in error
    assert all(line.startswith("brine: hint: ") for line in hint)
    assert not list(paths.SPECS_DIR.glob("*"))


def test_a_file_that_can_not_be_read(brine: Run, tmp_path: Path) -> None:
    for name, said in (("no", "No such file"), (".", "Is a directory")):
        status, _, err = brine("define", str(tmp_path / name))
        assert status == 1
        assert err.startswith(f"brine: error: {tmp_path / name}: can't be read: {said}")


def test_a_damaged_spec_is_written_anew_and_kept(web1: Run) -> None:
    before = spec()
    (paths.SPECS_DIR / "web1.json").write_text("{damaged")
    would_be = (0, "would be defined: web1\n", "")
    assert web1("define", "-", "--dry-run", stdin={"name": "web1"}) == would_be
    status, out, err = web1("define", "-", stdin={"name": "web1"})
    assert (status, out, spec()) == (0, "defined: web1\n", before)  # all of it comes of its name
    aside = paths.SPECS_DIR / "web1.damaged"
    assert err == f"brine: warning: the damaged spec of web1 is kept as {aside}\n"
    assert aside.read_text() == "{damaged"
    assert web1("list")[0] == 0
    (paths.SPECS_DIR / "web1.json").write_text("{again")
    _, _, err = web1("define", "-", "--json", stdin=[{"name": "web1"}])
    assert err == f"brine: warning: the damaged spec of web1 is kept as {aside}-2\n"


# undefine, rename


def test_rename_and_undefine(web1: Run) -> None:
    uuid = spec()["uuid"]
    assert web1("rename", "web1", "web2") == (0, "renamed: web1 to web2\n", "")
    (one,) = json.loads(web1("list", "--json")[1])
    assert (one["name"], one["uuid"]) == ("web2", uuid)
    assert web1("undefine", "web2") == (0, "undefined: web2\n", "")
    assert web1("list")[1] == "no instance is defined\n"
    assert web1("undefine", "web2")[0] == 1


@pytest.mark.parametrize("arguments", [["undefine", "web1"], ["rename", "web1", "web2"]])
@pytest.mark.parametrize("state", ["active", "activating", "deactivating"])
def test_what_runs_is_left_as_it_is(
    web1: Run, systemctl: ScriptedSystemctl, arguments: list[str], state: str
) -> None:
    systemctl.unit(UNIT, ActiveState=state)
    status, _, err = web1(*arguments)
    assert status == 1
    assert f"hint: brine instance stop web1, then {arguments[0]} it" in err
    assert spec()["name"] == "web1"


# start, stop, reboot


def test_start_and_stop_say_what_they_did(
    web1: Run, systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "runs_in", lambda *_: True)
    systemctl.becomes("start", UNIT, **{**RUNNING, "MainPID": str(os.getpid())})
    assert web1("start", "web1") == (0, "started: web1\n", "")
    with FakeQemus() as qemus:
        qemus.start(paths.CONTROL_DIR / "web1.qmp")
        assert web1("start", "web1") == (0, "unchanged: web1 runs\n", "")
    assert spec()["admin_state"] == "up"
    systemctl.unit(UNIT, ActiveState="inactive")
    noted = "noted: web1 is already down; it will not start with the node\n"
    assert web1("stop", "web1") == (0, noted, "")
    assert web1("stop", "web1") == (0, "unchanged: web1 does not run\n", "")
    assert spec()["admin_state"] == "down"


def test_what_changes_an_instance_tells_programs_of_each(
    web1: Run, systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(*arguments: str, status: int = 0) -> list[Any]:
        done, out, _ = web1(*arguments, "--json")
        assert done == status
        found: list[Any] = json.loads(out)["instances"]
        return found

    web1("define", "-", stdin={"name": "web2"})
    monkeypatch.setattr(process, "runs_in", lambda *_: True)
    for name in ("web1", "web2"):
        systemctl.becomes("start", unit_of(name), **{**RUNNING, "MainPID": str(os.getpid())})
    assert rows("start", "--keep-tries", "web1", "web2", "web1") == [
        {"name": name, "result": "started", "changed": True, "status": "running"}
        for name in ("web1", "web2")
    ]
    for name in ("web1", "web2"):
        systemctl.unit(unit_of(name), ActiveState="inactive")
    down = {"changed": True, "status": "ADMIN_down"}
    assert rows("stop", "web2") == [{"name": "web2", "result": "noted", **down}]
    found = rows("stop", "web2", "wbe1", "web1", status=1)
    assert found == [
        {"name": "web2", "result": "unchanged", **down, "changed": False},
        {
            "name": "wbe1",
            "error": "wbe1: there is no such instance",
            "hint": "did you mean web1?",
        },
        {"name": "web1", "result": "noted", **down},
    ]
    status, out, err = web1("stop", "web1", "wbe1", "web2")
    assert (status, sorted(out.splitlines())) == (
        1,
        ["unchanged: web1 does not run", "unchanged: web2 does not run"],
    )
    assert err.startswith("brine: error: wbe1: there is no such instance\nbrine: hint: ")
    renamed = json.loads(web1("rename", "web2", "db1", "--json")[1])
    assert renamed == {"name": "db1", "source": "web2", "result": "renamed"}
    undefined = json.loads(web1("undefine", "db1", "--json")[1])
    assert undefined == {
        "name": "db1",
        "result": "undefined",
        "changed": True,
        "volumes_deleted": [],
        "volumes_kept": [],
        "status": None,
    }


def test_a_start_that_fails_says_why(web1: Run, systemctl: ScriptedSystemctl) -> None:
    systemctl.refuse("start", "Job for web1 failed because of something.\nSee its status.\n")
    status, out, err = web1("start", "web1")
    assert (status, out) == (1, "")
    assert spec()["admin_state"] == "up"
    error, hint = err.splitlines()
    assert error.startswith("brine: error: web1: did not start: ")
    assert error.endswith("systemctl start: Job for web1 failed because of something.")
    assert hint == f"brine: hint: journalctl --unit {UNIT} has all of it"


def test_one_that_is_offline_is_not_started(web1: Run, systemctl: ScriptedSystemctl) -> None:
    web1("define", "-", stdin={"name": "web1", "admin_state": "offline"})
    status, _, err = web1("start", "web1")
    assert status == 1
    assert err.startswith("brine: error: web1: is offline\nbrine: hint: ")
    assert systemctl.asked("start") == []


def test_start_all_tells_of_each(web1: Run, systemctl: ScriptedSystemctl) -> None:
    for name, state in (("web1", "up"), ("web2", "up"), ("web3", "down")):
        web1("define", "-", stdin={"name": name, "admin_state": state})
    systemctl.unit(unit_of("web2"), **RUNNING)
    (paths.SPECS_DIR / "web4.json").write_text("{")
    status, out, err = web1("start", "--all")
    assert (status, out) == (1, "started: web1\n")
    assert err.startswith("brine: error: web4: ")


def test_a_setting_that_is_none_is_named(web1: Run) -> None:
    (paths.ETC_DIR / "instance.toml").write_text("parallel_starts = 0")
    status, _, err = web1("start", "--all")
    assert status == 1
    assert "instance.toml: parallel_starts: must be at least 1" in err


@pytest.mark.parametrize("arguments", [["reboot", "web1"], ["reboot", "web1", "--reset"]])
def test_what_does_not_run_is_not_rebooted(web1: Run, arguments: list[str]) -> None:
    status, _, err = web1(*arguments)
    assert status == 1
    assert err == ("brine: error: web1: does not run\nbrine: hint: brine instance start web1\n")


def test_options_are_passed_on(
    web1: Run, systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def note(name: str, *, force: bool, timeout_s: float | None) -> Stopped:
        asked.append((name, force, timeout_s))
        return Stopped.STOPPED

    monkeypatch.setattr(operations, "stop_instance", note)
    monkeypatch.setattr(operations, "reboot_instance", note)
    assert web1("stop", "web1")[1] == "stopped: web1\n"
    assert web1("stop", "web1", "--force", "--timeout", "1.5")[1] == "stopped: web1\n"
    assert web1("reboot", "web1", "--timeout", "7")[1] == "rebooted: web1\n"
    assert asked == [("web1", False, None), ("web1", True, 1.5), ("web1", False, 7.0)]


def test_all_that_run_are_stopped_in_their_order(
    web1: Run, brine: Run, systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert web1("stop", "--all") == (0, "no instance runs\n", "")
    assert json.loads(web1("stop", "--all", "--json")[1]) == {"instances": []}
    for name, order in (("db1", 50), ("app1", 200), ("app2", 200), ("off1", 10)):
        assert brine("define", "-", stdin={"name": name, "start_order": order})[0] == 0
    for name in ("web1", "db1", "app1", "app2"):
        systemctl.unit(unit_of(name), **RUNNING)
    monkeypatch.setattr(operations, "stop_instance", lambda name, **_: Stopped.STOPPED)
    status, out, err = web1("stop", "--all", "--parallel", "1")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        *("stopped: app1 (1 of 4)", "stopped: app2 (2 of 4)"),
        *("stopped: web1 (3 of 4)", "stopped: db1 (4 of 4)"),
    ]
    rows = json.loads(web1("stop", "--all", "--json")[1])["instances"]
    assert [row["name"] for row in rows] == ["app1", "app2", "web1", "db1"]


def test_verbs_take_several_instances(
    web1: Run, brine: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert brine("define", "-", stdin={"name": "db1"})[0] == 0
    monkeypatch.setattr(operations, "pause_instance", lambda name: name == "db1")
    status, out, _ = web1("pause", "web1", "db1")
    assert (status, sorted(out.splitlines())) == (
        0,
        ["paused: db1", "unchanged: web1 is paused"],
    )
    assert [one["name"] for one in json.loads(web1("info", "web1", "db1", "--json")[1])] == [
        "web1",
        "db1",
    ]
    assert web1("info", "web1", "db1")[1].count("Instance:") == 2
    assert web1("undefine", "web1", "db1")[0] == 0
    assert web1("list")[1] == "no instance is defined\n"


def test_keys_are_set_without_an_editor(web1: Run) -> None:
    status, out, err = web1("set", "web1", "memory_mib=2G", "vcpus=2", "tags=a,b", "cpu=qemu64")
    assert (status, err) == (0, "")
    assert out.startswith("defined: web1")
    known = spec()
    assert (known["memory_mib"], known["vcpus"], known["tags"]) == (2048, 2, ["a", "b"])
    assert known["cpu"] == "qemu64"
    told = json.loads(web1("set", "web1", "vcpus=", "cpu=", "--dry-run", "--json")[1])
    assert (told["spec"]["vcpus"], told["spec"]["cpu"], told["dry_run"]) == (1, "", True)
    assert spec() == known
    web1("set", "web1", "vcpus=", "tags=", 'boot_order=["network"]')
    assert (spec()["vcpus"], spec()["tags"], spec()["boot_order"]) == (1, [], ["network"])
    assert web1("set", "web1", "vcpus=1")[1].startswith("unchanged: web1")


@pytest.mark.parametrize(
    ("assignment", "said", "hint"),
    [
        ("memory_mib", "not KEY=VALUE", "memory_mib=4096"),
        ("memory=1", "no key 'memory'", "did you mean memory_mib?"),
        ("vcpu=1", "no key 'vcpu'", "did you mean vcpus?"),
        ("name=db1", "name can't be set", "rename"),
        ("memory_mib=10x", "memory_mib must be a size", "memory_mib=4G"),
        ("vcpus=two", "/vcpus: must be a whole number, but is 'two'", None),
        ("admin_state=on", "/admin_state: must be one of", 'did you mean "up"?'),
        ("disks=/dev/vg/x", "/disks", None),
    ],
)
def test_what_can_not_be_set_changes_nothing(
    web1: Run, assignment: str, said: str, hint: str | None
) -> None:
    before = spec()
    status, out, err = web1("set", "web1", "vcpus=2", assignment)
    assert (status in (1, 2), out) == (True, "")
    assert said in err.splitlines()[0]
    assert (hint or "") in err
    assert spec() == before


# console


def test_the_console_of_one_that_does_not_run(
    web1: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = "brine: error: web1: does not run\nbrine: hint: brine instance start web1\n"
    assert web1("console", "web1") == (1, "", said)
    with socket.socket(socket.AF_UNIX) as line:  # one that was killed leaves it behind
        line.bind(str(paths.CONTROL_DIR / "web1.serial"))
    assert web1("console", "web1") == (1, "", said)


def test_a_domain_that_others_may_not_see_stops_no_console(
    web1: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain, known = InstanceFiles("web1").domain, os.stat

    def refused(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if os.fspath(path) == str(domain):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return known(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refused)
    said = "brine: error: web1: does not run\nbrine: hint: brine instance start web1\n"
    assert web1("console", "web1") == (1, "", said)
    assert web1("define", "--dry-run", "-", stdin={"name": "web2"})[0] == 0


def test_the_console_of_one_that_runs_and_has_none(web1: Run, systemctl: ScriptedSystemctl) -> None:
    systemctl.unit(UNIT, **RUNNING)
    status, _, err = web1("console", "web1")
    assert status == 1
    line = paths.CONTROL_DIR / "web1.serial"
    assert err.startswith(f"brine: error: web1: {line}: No such file or directory\n")
    assert '"serial_console": true' in err


def test_the_console_of_one_that_has_no_spec(
    web1: Run, monkeypatch: pytest.MonkeyPatch, systemctl: ScriptedSystemctl
) -> None:
    attached: list[tuple[str, Path]] = []

    def attach(name: str, path: Path) -> int:
        attached.append((name, path))
        return 0

    monkeypatch.setattr(console, "attach", attach)
    assert web1("console", "web2") == (0, "", "")
    assert attached == [("web2", paths.CONTROL_DIR / "web2.serial")]


def test_an_unknown_option_leads_to_the_help_of_the_verb(brine: Run) -> None:
    status, _, err = brine("define", "x", "--nosuch")
    assert (status, err.splitlines()[-1]) == (2, "brine: hint: see brine instance define --help")


def test_a_list_without_a_spec_says_so(brine: Run) -> None:
    status, _, err = brine("define", "-", stdin=[])
    assert (status, "the list has no spec" in err) == (0, True)


def test_help_needs_nothing(brine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    status, out, _ = brine("--help")
    assert status == 0
    for verb in ("list", "info", "define", "undefine", "rename", "start", "stop", "reboot"):
        assert f"    {verb} " in out
    assert "Ctrl-] leaves" in out


# edit


def an_editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    editor = tmp_path / "editor"
    editor.write_text(f"#!/bin/sh\n{script}\n")
    editor.chmod(0o755)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", f"{editor} --wait")


def test_edit(web1: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    an_editor(tmp_path, monkeypatch, """sed -i 's/"memory_mib": [0-9]*/"memory_mib": 512/' "$2" """)
    assert web1("edit", "web1") == (0, "defined: web1\n", "")
    assert spec()["memory_mib"] == 512
    assert web1("edit", "web1") == (0, "unchanged: web1\n", "")
    assert list(tmp_path.glob("brine-web1-*")) == []


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ('echo { >"$2"', 1, "error: "),
        ("""sed -i 's/"memory_mib": [0-9]*/"memory_mib": -1/' "$2" """, 1, "/memory_mib"),
        ("""sed -i 's/"name": "web1"/"name": "web2"/' "$2" """, 2, "can't be edited"),
        ("""sed -i 's/"vcpus": [0-9]*/"vcpus": 2/' "$2"; exit 3""", 1, "exit status 3"),
    ],
)
def test_a_mistake_of_the_editors_changes_nothing_and_loses_nothing(
    web1: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    status: int,
    said: str,
) -> None:
    an_editor(tmp_path, monkeypatch, script)
    before = spec()
    ended, out, errors = web1("edit", "web1")
    assert (ended, out) == (status, "")
    warning, error, *_ = errors.splitlines()
    (kept,) = tmp_path.glob("brine-web1-*/web1.json")
    assert str(kept) in warning
    assert said in error
    assert spec() == before


def test_another_user_has_no_part_in_an_edit(
    web1: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    an_editor(tmp_path, monkeypatch, f"""stat --format=%a "${{2%/*}}" >{tmp_path}/mode""")
    assert web1("edit", "web1")[0] == 0
    assert (tmp_path / "mode").read_text() == "700\n"
    tmp_path.chmod(0o777)
    status, _, errors = web1("edit", "web1")
    assert (status, "other users can replace files there" in errors) == (1, True)
    tmp_path.chmod(0o1777)
    assert web1("edit", "web1")[0] == 0


@pytest.mark.parametrize("change", [":", """sed -i 's/"vcpus": 1/"vcpus": 2/' "$2" """])
def test_what_is_undefined_during_its_edit_is_no_more(
    web1: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    an_editor(tmp_path, monkeypatch, f"rm {paths.SPECS_DIR}/web1.json\n{change}")
    status, out, errors = web1("edit", "web1")
    assert (status, out) == (1, "")
    assert "no such instance" in errors or "undefined" in errors
    assert store.names() == []


@pytest.mark.parametrize(
    ("editor", "said"),
    [("false", "failed with exit status 1"), ("/nowhere", "No such file or directory")],
)
def test_an_editor_that_fails_leaves_nothing(
    web1: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, editor: str, said: str
) -> None:
    an_editor(tmp_path, monkeypatch, "")
    monkeypatch.setenv("EDITOR", editor)
    status, _, errors = web1("edit", "web1")
    assert (status, errors.splitlines()[0]) == (1, f"brine: error: {editor}: {said}")
    assert list(tmp_path.glob("brine-web1-*")) == []


# What is told to end


def in_own_process(call: Callable[[], tuple[int, str, str]], folder: Path) -> tuple[int, str, str]:
    """The result of a call in a process without other threads, as the command is: a signal could
    be another thread's. It is not ignored there, either, as it is in a background job."""
    result = folder / "result"
    process = os.fork()
    if process == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            result.write_text(json.dumps(call()))
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    status, out, err = json.loads(result.read_text())
    return status, out, err


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_several_stops_that_are_told_to_end_undo_what_they_began(
    web1: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: signal.Signals
) -> None:
    def stop(name: str, **_: object) -> Stopped:
        if name == "web3":
            return Stopped.STOPPED
        try:
            (tmp_path / f"{name}-began").touch()
            if all((tmp_path / f"{each}-began").exists() for each in ("web1", "web2")):
                with suppress(FileExistsError):  # the other one has told it
                    (tmp_path / "told").touch(exist_ok=False)
                    os.kill(os.getppid(), told)
            while True:  # a signal may come at any point of it
                time.sleep(0.01)
        finally:
            (tmp_path / f"{name}-undone").touch()
        return Stopped.STOPPED

    monkeypatch.setattr(operations, "stop_instance", stop)
    status, out, err = in_own_process(lambda: web1("stop", "web3", "web1", "web2"), tmp_path)
    assert (status, out) in ((128 + told, "stopped: web3\n"), (128 + told, ""))
    assert sorted(one.name for one in tmp_path.glob("*-undone")) == ["web1-undone", "web2-undone"]
    if told is signal.SIGINT:
        assert "interrupted: web1 is down; its admin_state is down" in err


def test_where_no_process_can_be_made_each_instance_has_the_error(
    web1: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    status, out, err = web1("stop", "web1", "web2")
    assert (status, out) == (1, "")
    assert err.splitlines() == [
        f"brine: error: {name}: the system: Resource temporarily unavailable"
        for name in ("web1", "web2")
    ]


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_that_is_told_to_end_undoes_what_it_began(
    web1: Run, monkeypatch: pytest.MonkeyPatch, told: signal.Signals
) -> None:
    undone = []

    def stop(name: str, **_: object) -> Stopped:
        try:
            os.kill(os.getpid(), told)
            signal.sigtimedwait([], 1)
        finally:
            undone.append(name)
        return Stopped.STOPPED

    monkeypatch.setattr(operations, "stop_instance", stop)
    assert web1("stop", "web1") == (128 + told, "", "")
    assert undone == ["web1"]


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        (["stop", "web1"], "runs on, and may still do what it was asked"),
        (["reboot", "web1"], "runs, and may still reboot"),
        (["reboot", "web1", "--reset"], "runs, and may still reboot"),
    ],
)
def test_who_gives_up_waiting_is_told_what_holds(
    web1: Run,
    systemctl: ScriptedSystemctl,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    runs: str,
) -> None:
    def give_up(name: str, **_: object) -> Stopped:
        raise KeyboardInterrupt

    for name in ("stop_instance", "reboot_instance", "reset_instance"):
        monkeypatch.setattr(operations, name, give_up)
    systemctl.unit(UNIT, **RUNNING)
    said = f"interrupted: web1 {runs}; its admin_state is down\n"
    assert web1(*arguments) == (130, "", said)
    systemctl.unit(UNIT, ActiveState="inactive")
    said = "interrupted: web1 is down; its admin_state is down\n"
    assert web1(*arguments) == (130, "", said)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "nics: [{mac: 52:54:00:11:22:33, link: br0}]",
            "52:54:00:11:22:33 is a number to the base",
        ),
        ("memory_mib: 010", "010 is octal, that is 8: write 8, or put it in quotes"),
        ("append: -0_17", "-0_17 is octal"),
    ],
)
def test_a_number_that_yaml_reads_as_another_one_is_refused(
    brine: Run, tmp_path: Path, line: str, said: str
) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(f"name: web1\n{line}\n")
    status, out, err = brine("define", str(file))
    assert (status, out) == (1, "")
    assert f"not valid YAML at line 2: {said}" in err
    file.write_text("{name: web1, memory_mib: 0x400, vcpus: 10, start_order: -0}")
    assert brine("define", str(file))[0] == 0
    assert (spec()["memory_mib"], spec()["vcpus"]) == (1024, 10)


@pytest.mark.parametrize("value", [41135080953, 5.5])
def test_a_hint_to_quote_a_number_gives_no_value(brine: Run, value: float) -> None:
    status, _, err = brine("define", "-", stdin={"name": "web1", "append": value})
    assert status == 1
    hint = err.splitlines()[-1]
    assert "put it in quotes" in hint
    assert str(value) not in hint


@pytest.mark.parametrize(
    ("line", "where", "noun"),
    [
        ("append: on", "/append", "true"),
        ("append: 2026-05-04", "/append", "a date"),
        ("append: 2026-05-04 10:00:00", "/append", "a datetime"),
        ("tags: [2026-05-04]", "/tags/0", "a date"),
        ("append: !!binary aGkK", "/append", "a bytes"),
        ("append: !!set {a, b}", "/append", "a set"),
    ],
)
def test_what_yaml_makes_no_string_of_is_to_be_quoted(
    brine: Callable[..., tuple[int, str, str]], tmp_path: Path, line: str, where: str, noun: str
) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(f"name: web1\n{line}\n")
    status, out, err = brine("define", str(file))
    assert (status, out) == (1, "")
    error, hint = err.splitlines()
    assert error == f"brine: error: {file}: {where}: must be a string, but is {noun}"
    assert hint == "brine: hint: put it in quotes"
