"""``brine config``, as a person uses it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from brine.common import cli
from brine.common.cli import EntryPoint
from lab.ganeti_config import ganeti_config, instance_name, uuid_of

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def brine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs ``brine config`` on a store of its own: status, output, errors."""
    entry = EntryPoint("config", "brine.config.cli:COMMAND")
    monkeypatch.setattr(cli, "entry_points", lambda _group: [entry])

    def run(*arguments: str, stdin: object = None) -> tuple[int, str, str]:
        data = io.BytesIO(json.dumps(stdin).encode())
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=data))
        try:
            file = str(tmp_path / "config.data")
            status = cli.main(["config", "--config", file, *arguments])
        except SystemExit as end:
            status = int(str(end.code))
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


@pytest.fixture
def filled(brine: Run) -> Run:
    """The same, on a store with a configuration."""
    assert brine("apply", "-", stdin=ganeti_config())[0] == 0
    return brine


def test_apply_says_what_it_did(filled: Run) -> None:
    change = {"instances": {instance_name(1): {"admin_state": "down"}}}
    line = f'~ /instances/{instance_name(1)}/admin_state: "up" -> "down"\n'
    assert filled("apply", "-", "--dry-run", stdin=change) == (
        0,
        f"{line}would apply: 1 change\n",
        "",
    )
    applied = f"{line}applied: serial 42 -> 43, 1 change\n"
    assert filled("apply", "-", stdin=change) == (0, applied, "")
    assert filled("apply", "-", stdin=change) == (0, "no changes: serial 43\n", "")


def test_apply_for_programs(filled: Run) -> None:
    status, output, _ = filled(
        "apply", "-", "--json", stdin={"instances": {instance_name(1): None}}
    )
    result = json.loads(output)
    assert status == 0
    assert (result["old_serial"], result["new_serial"]) == (42, 43)
    assert result["changes"][0] == {
        "change": "removed",
        "pointer": f"/instances/{instance_name(1)}",
        "old": None,
        "new": None,
        "note": "",
    }
    assert result["changes"][1] | {"pointer": ""} == {
        "change": "removed",
        "pointer": "",
        "old": None,
        "new": None,
        "note": f"disk 0 of {instance_name(1)}",
    }


def test_mistakes_are_one_line_each_and_change_nothing(filled: Run) -> None:
    status, output, errors = filled("apply", "-", stdin={"node": {}, "instance": 5, "clust": {}})
    assert (status, output) == (1, "")
    assert errors.splitlines()[0] == "brine: error: /node: is not known; did you mean nodes?"
    assert errors.splitlines()[1].startswith("  /clust: is not known; did you mean cluster?")
    assert filled("show", "/serial_no")[1] == "42\n"


def test_show_takes_names(filled: Run) -> None:
    assert filled("show", "/instances/instance1/nics/0/ip") == (0, '"10.0.0.1"\n', "")
    assert (
        filled("show", f"/instances/{uuid_of('instance', 1)}/name")[1] == f'"{instance_name(1)}"\n'
    )
    assert json.loads(filled("show")[1]) == ganeti_config()
    assert filled("show", "/cluster/uid_pol")[2] == (
        "brine: error: there is no /cluster/uid_pol\nbrine: hint: did you mean uid_pool?\n"
    )
    status, _, errors = filled("show", "cluster/tags")
    assert status == 1
    assert errors.splitlines() == [
        "brine: error: cluster/tags is no JSON pointer",
        "brine: hint: a pointer begins with a slash: /cluster/tags",
    ]
    assert "~ is written ~0" in filled("show", "/cluster/a~b")[2]


def test_verify_ends_with_one_if_there_are_faults(filled: Run, tmp_path: Path) -> None:
    assert filled("verify") == (0, "no faults\n", "")
    data = ganeti_config()
    data["cluster"]["master_node"] = "x"
    other = tmp_path / "other"
    other.write_text(json.dumps(data))
    status, output, _ = filled("verify", str(other))
    assert (status, output) == (1, "/cluster/master_node: there is no node 'x'\n1 fault\n")
    assert json.loads(filled("verify", str(other), "--json")[1])[0]["kind"] == "dangling"


def test_an_older_file_is_told_and_gone_on_from(filled: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.data"
    older = config.read_bytes()
    for number in range(3):
        filled("apply", "-", stdin={"cluster": {"tags": [f"{number}"]}})
    config.unlink()
    config.write_bytes(older)

    fault = "/serial_no: 42 is older than kept version 44"
    assert filled("verify") == (1, f"{fault}\n1 fault\n", "")
    assert json.loads(filled("verify", "--json")[1])[0]["kind"] == "older"

    told = "serial 42, which is older than kept version 44: serial numbers go on"
    status, would, _ = filled("apply", "-", "--dry-run", stdin={})
    assert status == 0
    assert would.splitlines()[0] == "~ /serial_no: 42 -> 46"
    assert f"note: {config} has {told}" in would
    assert filled("show", "/serial_no")[1] == "42\n"

    done = json.loads(filled("apply", "-", "--json", stdin={})[1])
    assert (done["old_serial"], done["new_serial"]) == (42, 46)
    assert [change["pointer"] for change in done["changes"]] == ["/serial_no"]
    (note,) = done["notes"]
    assert note.startswith(f"{config} had {told}")
    (aside,) = tmp_path.glob("config.data.older-*")
    assert note.endswith(f"that file is kept as {aside}")
    assert aside.read_bytes() == older
    assert filled("verify")[0] == 0
    assert filled("apply", "-", stdin={}) == (0, "no changes: serial 46\n", "")


def test_a_restore_tells_of_an_older_file(filled: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.data"
    older = config.read_bytes()
    for number in range(3):
        filled("apply", "-", stdin={"cluster": {"tags": [f"{number}"]}})
    config.unlink()
    config.write_bytes(older)
    status, output, _ = filled("restore", "44")
    assert status == 0
    assert "~ /serial_no: 42 -> 46\n" in output
    assert "note: " in output
    assert output.endswith("restored: the content of serial 44, as 46\n")


def test_apply_does_not_begin_anew_where_a_configuration_was_lost(
    filled: Run, tmp_path: Path
) -> None:
    filled("apply", "-", stdin={"cluster": {"tags": ["blue"]}})
    (tmp_path / "config.data").unlink()
    for options in ([], ["--dry-run"]):
        status, output, errors = filled("apply", "-", *options, stdin=ganeti_config())
        assert (status, output) == (1, "")
        assert "there is no configuration, but versions of one are kept" in errors
        assert "brine config restore 42" in errors
    assert not (tmp_path / "config.data").exists()
    (tmp_path / "config.versions").rename(tmp_path / "away")
    assert filled("apply", "-", stdin=ganeti_config())[0] == 0


def test_a_change_is_seen_and_undone(filled: Run) -> None:
    assert filled("diff")[0] == 1
    filled("apply", "-", stdin={"cluster": {"tags": ["blue"]}})
    line = '~ /cluster/tags: [] -> ["blue"]\n'
    assert filled("diff") == (0, f"{line}serial 42 -> 43: 1 change\n", "")
    assert [version["serial"] for version in json.loads(filled("versions", "--json")[1])] == [42]
    status, output, _ = filled("restore", "42")
    assert (status, output.splitlines()[-1]) == (0, "restored: the content of serial 42, as 44")
    assert filled("diff", "42", "44")[1] == "serial 42 -> 44: no changes\n"
    assert filled("show", "/cluster/tags")[1] == "[]\n"


def test_a_restore_is_rehearsed_and_told_to_programs(filled: Run) -> None:
    filled("apply", "-", stdin={"cluster": {"tags": ["blue"]}})
    line = '~ /cluster/tags: ["blue"] -> []\n'
    would = f"{line}would restore: the content of serial 42, as 44\n"
    assert filled("restore", "42", "--dry-run") == (0, would, "")
    rehearsed = json.loads(filled("restore", "42", "--dry-run", "--json")[1])
    assert (rehearsed["dry_run"], rehearsed["new_serial"]) == (True, None)
    assert filled("show", "/serial_no")[1] == "43\n"
    done = json.loads(filled("restore", "42", "--json")[1])
    assert done == rehearsed | {"dry_run": False, "new_serial": 44}
    assert [change["pointer"] for change in done["changes"]] == ["/cluster/tags"]


def test_a_key_that_is_there_twice_is_refused(filled: Run, tmp_path: Path) -> None:
    file = tmp_path / "input"
    file.write_text('{"cluster": {"tags": ["a"], "tags": ["b"]}}')
    errors = filled("apply", str(file))[2]
    assert "input: not usable JSON: the key 'tags' is twice in one object" in errors


def test_export_for_programs(filled: Run, tmp_path: Path) -> None:
    done = json.loads(filled("export-ssconf", "--json", str(tmp_path / "ssconf"))[1])
    assert (done["dry_run"], done["removed"]) == (False, [])
    assert "master_node" in done["written"]


def test_export_says_what_it_wrote(filled: Run, tmp_path: Path) -> None:
    folder = tmp_path / "ssconf"
    assert "would write" in filled("export-ssconf", str(folder), "--dry-run")[1]
    assert not folder.exists()
    assert "+ ssconf_master_node\n" in filled("export-ssconf", str(folder))[1]
    assert filled("export-ssconf", str(folder))[1] == "no changes\n"


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_export_makes_one_folder_only(filled: Run, tmp_path: Path, options: list[str]) -> None:
    folder = tmp_path / "mistyped" / "ssconf"
    status, output, errors = filled("export-ssconf", str(folder), *options)
    assert (status, output) == (1, "")
    assert f"{folder}: there is no folder {folder.parent}" in errors
    assert f"mkdir --parents {folder.parent}" in errors
    assert not folder.parent.exists()


def test_a_file_that_is_not_json_is_named(brine: Run, tmp_path: Path) -> None:
    file = tmp_path / "input"
    file.write_text("cluster: {}\n")
    errors = brine("apply", str(file))[2]
    assert "input: not valid JSON at byte 0" in errors
    assert "the state brine.config" in errors
    assert "there is no configuration" in brine("show")[2]


@pytest.mark.parametrize(
    "arguments", [["apply"], ["restore", "x"], ["--lock-timeout", "-1", "apply", "-"], ["sow"]]
)
def test_a_wrong_command_line_ends_with_two(brine: Run, arguments: list[str]) -> None:
    assert brine(*arguments)[0] == 2


def test_help_is_light() -> None:
    """`brine --help` loads this command: what takes long to import must not come along."""
    script = "import brine.config.cli, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    heavy = {"brine.config.model", "brine.config.params", "jsonpointer"}
    assert not heavy & set(done.stdout.split())
