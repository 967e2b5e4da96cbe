"""``brine uidpool``, as a person uses it."""

from __future__ import annotations

import errno
import grp
import io
import json
import pwd
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from brine.common import cli, paths
from brine.common.cli import EntryPoint
from brine.common.locks import locked
from brine.config import ssconf
from brine.config.model import Configuration
from brine.config.ssconf import Ssconf
from lab.ganeti_config import ganeti_config

Run = Callable[..., tuple[int, str, str]]

POOL = "/cluster/uid_pool"


@pytest.fixture
def brine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs ``brine`` on a node of its own: status, output, errors."""
    nouns = [
        EntryPoint("config", "brine.config.cli:COMMAND"),
        EntryPoint("uidpool", "brine.config.cli:UIDPOOL_COMMAND"),
    ]
    monkeypatch.setattr(cli, "entry_points", lambda _group: nouns)
    monkeypatch.setattr(paths, "CONFIG_FILE", tmp_path / "config.data")
    monkeypatch.setattr(paths, "CONFIG_LOCK", tmp_path / "config.lock")
    monkeypatch.setattr(paths, "SSCONF_DIR", tmp_path / "ssconf")
    monkeypatch.setattr(pwd, "getpwall", list)

    def run(*arguments: str, stdin: object = None) -> tuple[int, str, str]:
        data = io.BytesIO(json.dumps(stdin).encode())
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=data))
        try:
            status = cli.main(arguments)
        except SystemExit as end:
            status = int(str(end.code))
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


@pytest.fixture
def filled(brine: Run) -> Run:
    """The same, on a master whose pool is 4000-4099."""
    assert brine("config", "apply", "-", stdin=ganeti_config())[0] == 0
    return brine


def test_what_is_added_and_removed_is_said(filled: Run) -> None:
    assert filled("uidpool", "show") == (0, "4000-4099\n", "")
    status, output, errors = filled("uidpool", "add", "5000,6000-6009")
    assert (status, errors) == (0, "")
    assert output.splitlines() == [
        f"~ {POOL}: [[4000, 4099]] -> [[4000, 4099], [5000, 5000], [6000, 6009]]",
        "applied: serial 42 -> 43, 1 change",
    ]
    assert filled("uidpool", "remove", "4050", "6000-6009")[0] == 0
    assert filled("uidpool", "show") == (0, "4000-4049,4051-4099,5000\n", "")
    stored = json.loads(filled("config", "show", POOL)[1])
    assert stored == [[4000, 4049], [4051, 4099], [5000, 5000]]
    assert filled("config", "versions", "--json")[1].count('"serial"') == 2


def test_the_serials_rise_as_with_apply(filled: Run, tmp_path: Path) -> None:
    before = json.loads((tmp_path / "config.data").read_bytes())
    filled("uidpool", "add", "5000")
    after = json.loads((tmp_path / "config.data").read_bytes())
    assert (before["serial_no"], after["serial_no"]) == (42, 43)
    assert after["cluster"]["serial_no"] == before["cluster"]["serial_no"] + 1
    assert after["cluster"]["mtime"] > before["cluster"]["mtime"]
    changed = {key for key in after["cluster"] if after["cluster"][key] != before["cluster"][key]}
    assert changed == {"uid_pool", "serial_no", "mtime"}
    same = set(after) - {"serial_no", "mtime", "cluster"}
    assert {key: after[key] for key in same} == {key: before[key] for key in same}


def test_what_is_shown_can_be_set(filled: Run) -> None:
    filled("uidpool", "add", "5000,6000-6009")
    shown = filled("uidpool", "show")[1]
    assert filled("uidpool", "set", "7000")[0] == 0
    assert filled("uidpool", "show")[1] == "7000\n"
    assert filled("uidpool", "set", shown)[0] == 0
    assert filled("uidpool", "show")[1] == shown
    assert filled("uidpool", "set", "4000-4099\n5000\n6000-6009")[1] == "no changes: serial 45\n"


def test_what_is_there_already_changes_nothing(filled: Run) -> None:
    assert filled("uidpool", "add", "4010-4020") == (0, "no changes: serial 42\n", "")
    assert filled("uidpool", "set", "4000-4099") == (0, "no changes: serial 42\n", "")
    touching = {"cluster": {"uid_pool": "4000-4049,4050-4099"}}
    assert filled("config", "apply", "-", stdin=touching)[0] == 0
    assert filled("uidpool", "set", "4000-4099") == (0, "no changes: serial 43\n", "")
    # What is declared in pillar and what is done by hand do not take turns.
    assert filled("config", "apply", "-", stdin=touching)[1] == "no changes: serial 43\n"


def test_what_is_not_there_can_not_be_removed(filled: Run) -> None:
    status, output, errors = filled("uidpool", "remove", "4090-4105,5000")
    assert (status, output) == (1, "")
    assert errors.splitlines() == [
        "brine: error: not in the pool: 4100-4105,5000",
        "brine: hint: brine uidpool show prints what is in it",
    ]
    assert filled("uidpool", "show")[1] == "4000-4099\n"


def test_an_emptied_pool_is_told_but_not_as_ranges(filled: Run) -> None:
    assert filled("uidpool", "remove", "4000-4099")[0] == 0
    status, output, errors = filled("uidpool", "show")
    assert (status, output) == (0, "")
    assert errors == "the pool is empty: no user ids are given out\n"
    assert json.loads(filled("uidpool", "show", "--json")[1])["count"] == 0
    assert filled("uidpool", "set", output) == (0, "no changes: serial 43\n", "")


def test_a_change_is_rehearsed(filled: Run, tmp_path: Path) -> None:
    ssconf.write(tmp_path / "ssconf", ssconf.export(Configuration.from_json(ganeti_config())))

    def written() -> dict[Path, tuple[int, int]]:
        found = {file: file.stat() for file in tmp_path.rglob("*")}
        return {file: (status.st_ino, status.st_mtime_ns) for file, status in found.items()}

    before = written()
    status, output, _ = filled("uidpool", "add", "--dry-run", "5000")
    assert status == 0
    assert output.endswith(
        f"note: {tmp_path}/ssconf would be brought up to date\nwould apply: 1 change\n"
    )
    assert written() == before


def test_for_programs(filled: Run, tmp_path: Path) -> None:
    assert json.loads(filled("uidpool", "show", "--json")[1]) == {
        "uid_pool": "4000-4099",
        "ranges": [[4000, 4099]],
        "count": 100,
        "source": str(tmp_path / "config.data"),
    }
    done = json.loads(filled("uidpool", "add", "4100", "--json")[1])
    assert done == {
        "dry_run": False,
        "old_serial": 42,
        "new_serial": 43,
        "changes": [
            {
                "change": "changed",
                "pointer": POOL,
                "old": [[4000, 4099]],
                "new": [[4000, 4100]],
                "note": "",
            }
        ],
        "notes": [],
        "uid_pool": "4000-4100",
    }
    assert json.loads(filled("uidpool", "set", "", "--json", "--dry-run")[1])["uid_pool"] == ""


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["add", "alice"], "'alice' is no range of user ids, such as 4000-4099"),
        (["set", "0-99"], "user id 0 is root's, which can't be in a pool"),
        (["remove", "5-1"], "[5, 1] is no range of user ids"),
        (["add", "5000,5000"], "the range 5000-5000 overlaps the one before"),
        (["add", ""], "no user ids are given"),
        (["remove", ","], "no user ids are given"),
        (["add"], "the following arguments are required: RANGES"),
        (["grow", "5"], "invalid choice: 'grow'"),
        (["--lock-timeout", "-1", "add", "5"], "--lock-timeout must be"),
    ],
)
def test_a_wrong_command_line_ends_with_two(filled: Run, arguments: list[str], error: str) -> None:
    status, output, errors = filled("uidpool", *arguments)
    assert (status, output) == (2, "")
    assert error in errors.splitlines()[0]
    assert filled("config", "show", "/serial_no")[1] == "42\n"


def test_accounts_of_the_node_are_told_of(filled: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    users = [SimpleNamespace(pw_uid=1000 + n, pw_name=f"user{n}") for n in range(7)]
    groups = [SimpleNamespace(gr_gid=n, gr_name="staff") for n in (1000, 1050)]
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    monkeypatch.setattr(grp, "getgrall", lambda: groups)
    output = filled("uidpool", "add", "1006-1100")[1]
    said = "1006 (user6), 1050 (group staff)"
    assert f"note: accounts of this node have some of these, and keep them: {said}\n" in output
    (note,) = json.loads(filled("uidpool", "set", "1000-1100", "--json")[1])["notes"]
    assert note.endswith(
        " 1000 (user0), 1001 (user1), 1002 (user2), 1003 (user3), 1004 (user4) and 3 more"
    )
    assert "note" not in filled("uidpool", "remove", "1000-1100")[1]
    assert "note" not in filled("uidpool", "add", "999,1007")[1]


# What nodes know.


def test_ssconf_is_kept_in_step(filled: Run, tmp_path: Path) -> None:
    (tmp_path / "ssconf").mkdir()
    assert (
        f"note: {tmp_path}/ssconf is up to date; the other nodes need a copy of it\n"
        in (filled("uidpool", "add", "5000")[1])
    )
    assert Ssconf(tmp_path / "ssconf").uid_pool() == [[4000, 4099], [5000, 5000]]
    assert filled("config", "export-ssconf", str(tmp_path / "ssconf"))[1] == "no changes\n"
    # It was missed once, such as by an apply: then the next one makes up for it.
    assert filled("config", "apply", "-", stdin={"cluster": {"uid_pool": "7000"}})[0] == 0
    assert f"note: {tmp_path}/ssconf is up to date" in filled("uidpool", "add", "7000")[1]
    assert Ssconf(tmp_path / "ssconf").uid_pool() == [[7000, 7000]]
    assert filled("uidpool", "add", "7000") == (0, "no changes: serial 44\n", "")


def test_ssconf_that_can_not_be_written_is_told(
    filled: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssconf").mkdir()

    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ssconf, "write_whole", full)
    status, _, errors = filled("uidpool", "add", "5000")
    assert status == 1
    assert "No space left on device" in errors.splitlines()[0]
    assert errors.splitlines()[1] == (
        f"brine: hint: the configuration has it; then brine config export-ssconf {tmp_path}/ssconf"
    )
    assert filled("uidpool", "show")[1] == "4000-4099,5000\n"


def test_values_that_can_not_be_leave_all_as_it_was(brine: Run, tmp_path: Path) -> None:
    data = ganeti_config()
    data["cluster"]["tags"] = ["two\nlines"]
    (tmp_path / "config.data").write_text(json.dumps(data))
    (tmp_path / "ssconf").mkdir()
    status, _, errors = brine("uidpool", "add", "5000")
    assert status == 1
    assert "ssconf cluster_tags: 'two\\nlines' is more than one line" in errors
    assert brine("uidpool", "show")[1] == "4000-4099\n"


def test_the_configuration_of_another_cluster_leaves_ssconf_alone(
    filled: Run, tmp_path: Path
) -> None:
    (tmp_path / "ssconf").mkdir()
    other = tmp_path / "other.data"
    other.write_bytes((tmp_path / "config.data").read_bytes())
    assert filled("uidpool", "--config", str(other), "add", "5000")[0] == 0
    assert filled("uidpool", "--config", str(other), "show")[1] == "4000-4099,5000\n"
    assert filled("uidpool", "show")[1] == "4000-4099\n"
    assert list((tmp_path / "ssconf").iterdir()) == []


def test_a_node_without_configuration_shows_what_it_was_told(brine: Run, tmp_path: Path) -> None:
    data = ganeti_config()
    data["cluster"]["uid_pool"] = [[4000, 4099], [5000, 5000]]
    ssconf.write(tmp_path / "ssconf", ssconf.export(Configuration.from_json(data)))
    assert brine("uidpool", "show") == (0, "4000-4099,5000\n", "")
    shown = json.loads(brine("uidpool", "show", "--json")[1])
    assert shown["source"] == str(tmp_path / "ssconf/ssconf_uid_pool")
    assert shown["ranges"] == [[4000, 4099], [5000, 5000]]

    status, output, errors = brine("uidpool", "add", "6000")
    assert (status, output) == (1, "")
    assert errors == (
        f"brine: error: {tmp_path}/config.data: there is no configuration\n"
        "brine: hint: the pool is changed on the master, node1.example.com\n"
    )
    # But a file that was asked for has to be there.
    assert brine("uidpool", "--config", str(tmp_path / "other"), "show")[0] == 1


def test_a_node_that_knows_nothing_says_so(brine: Run) -> None:
    status, output, errors = brine("uidpool", "show")
    assert (status, output) == (1, "")
    assert "there is no" in errors
    assert "brine config export-ssconf makes it" in errors
    status, _, errors = brine("uidpool", "set", "4000")
    assert status == 1
    assert "brine config apply FILE makes one" in errors


def test_a_configuration_that_was_lost_is_not_begun_anew(filled: Run, tmp_path: Path) -> None:
    filled("uidpool", "add", "5000")
    (tmp_path / "config.data").unlink()
    status, _, errors = filled("uidpool", "add", "6000")
    assert status == 1
    assert "brine config restore 42" in errors
    assert not (tmp_path / "config.data").exists()


# What others do, and did.


def test_it_waits_for_another_writer_but_not_for_ever(filled: Run, tmp_path: Path) -> None:
    with locked(tmp_path / "config.lock", timeout_s=0):
        status, _, errors = filled("uidpool", "--lock-timeout", "0", "add", "5000")
        assert status == 1
        assert "config.lock: locked by process" in errors
        assert filled("uidpool", "show")[0] == 0
    assert filled("uidpool", "add", "5000")[0] == 0


def test_a_pool_with_a_fault_can_only_be_replaced(brine: Run, tmp_path: Path) -> None:
    data = ganeti_config()
    data["cluster"]["uid_pool"] = [[0, 99]]
    file = tmp_path / "config.data"
    file.write_text(json.dumps(data))
    for arguments in (["show"], ["add", "4000"], ["remove", "50"]):
        status, output, errors = brine("uidpool", *arguments)
        assert (status, output) == (1, "")
        assert errors == (
            f"brine: error: {file}: uid_pool: user id 0 is root's, which can't be in a pool\n"
            "brine: hint: brine uidpool set RANGES, on the master, replaces it\n"
        )
    assert brine("uidpool", "set", "1-99")[0] == 0
    assert brine("uidpool", "show")[1] == "1-99\n"


def test_an_older_file_is_told_of(filled: Run, tmp_path: Path) -> None:
    older = (tmp_path / "config.data").read_bytes()
    filled("uidpool", "add", "5000")
    filled("uidpool", "add", "6000")
    (tmp_path / "config.data").unlink()
    (tmp_path / "config.data").write_bytes(older)
    output = filled("uidpool", "add", "7000")[1]
    assert "~ /serial_no: 42 -> 45\n" in output
    assert "which is older than kept version 43" in output
