"""The Salt states of a node that gets its copy from the external pillar."""

from __future__ import annotations

import base64
import grp
import json
import os
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unit.salt_loader import execution_module, load

SECRET = "sesame"
NEW, OLD = '{"serial_no":7}\n', '{"serial_no":6}\n'


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user and group but those named ``nobody-here`` is the one that runs the tests."""

    def user(name: str) -> pwd.struct_passwd:
        if name == "nobody-here":
            raise KeyError(name)
        return own_user

    own_user, own_group = pwd.getpwuid(os.getuid()), grp.getgrgid(os.getgid())
    monkeypatch.setattr(pwd, "getpwnam", user)
    monkeypatch.setattr(grp, "getgrnam", lambda _: own_group)


def config_states(
    *, test: bool = False, refusal: str = "", cache: Path = Path("/nonexistent"), **distributed: Any
) -> ModuleType:
    """The states of the configuration, for a node that is given these.

    :param refusal: of ``brine config check-copy``.
    :param cache: the folder of the note of files that were created.
    """

    def run_all(command: list[str], stdin: str, **_: Any) -> dict[str, Any]:
        assert command[:4] == ["brine", "config", "check-copy", "-"]
        assert stdin == NEW
        if refusal:
            return {"retcode": 1, "stdout": "", "stderr": refusal}
        return {"retcode": 0, "stdout": '{"serial": 7, "current_serial": 6}', "stderr": ""}

    given = {"serial": 7, "candidate": True, "configuration": NEW, **distributed}
    functions = {"brine.ask": execution_module(run_all).ask, "cmd.which": lambda name: name}
    states = load(
        "states",
        "brine_config",
        __opts__={"test": test},
        __pillar__={"brine": {"distributed": given} if distributed != {"serial": 0} else {}},
        __salt__=functions,
    )
    states.CREATED = str(cache / "salt-files")  # type: ignore[attr-defined]
    return states


def listing(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("test", [False, True])
@pytest.mark.parametrize("before", [None, OLD])
def test_a_candidate_gets_the_configuration(tmp_path: Path, before: str | None, test: bool) -> None:
    config = tmp_path / "config.data"
    if before:
        config.write_text(before)
    result = config_states(test=test).copied(str(config))
    assert result["result"] is (None if test else True)
    assert result["changes"][str(config)]["new"] == "serial 7"
    if test:
        assert config.exists() is bool(before)
        return
    assert config.read_text() == NEW
    assert config.stat().st_mode & 0o777 == 0o640
    assert listing(tmp_path) == ["config.data"]
    assert config_states().copied(str(config))["changes"] == {}


@pytest.mark.parametrize("test", [False, True])
def test_a_configuration_that_is_refused_replaces_nothing(tmp_path: Path, test: bool) -> None:
    config = tmp_path / "config.data"
    config.write_text(OLD)
    refusal = "brine: error: serial 7 is older than 9"
    result = config_states(test=test, refusal=refusal).copied(str(config))
    assert (result["result"], result["changes"]) == (False, {})
    assert refusal in result["comment"]
    assert config.read_text() == OLD
    assert listing(tmp_path) == ["config.data"]


@pytest.mark.parametrize("candidate", [False, True])
def test_what_can_not_be_read_or_moved_is_told_in_one_line(tmp_path: Path, candidate: bool) -> None:
    (tmp_path / "file").write_text(OLD)
    folder, below_a_file = tmp_path / "config.data", tmp_path / "file/config.data"
    folder.mkdir()
    places = [folder, below_a_file] if candidate else ["/proc/version"]
    for config in places:
        result = config_states(candidate=candidate).copied(str(config))
        assert (result["result"], result["changes"]) == (False, {})
        assert f"{config} can't be written: " in result["comment"]


@pytest.mark.parametrize("test", [False, True])
def test_a_former_candidate_has_no_configuration(tmp_path: Path, test: bool) -> None:
    config = tmp_path / "config.data"
    config.write_text(OLD)
    result = config_states(test=test, candidate=False).copied(str(config))
    assert result["result"] is (None if test else True)
    assert result["changes"]
    assert config.exists() is test
    if not test:
        (aside,) = tmp_path.iterdir()
        assert aside.name.startswith("config.data.former-")
        assert aside.read_text() == OLD
        assert config_states(candidate=False).copied(str(config))["changes"] == {}


def test_a_node_that_is_given_nothing_keeps_what_it_has(tmp_path: Path) -> None:
    config = tmp_path / "config.data"
    config.write_text(OLD)
    for nothing in (config_states(serial=0), config_states(fault="the master's log says why")):
        for result in (
            nothing.copied(str(config)),
            nothing.ssconf_copied(str(tmp_path)),
            nothing.files_copied("files"),
        ):
            assert (result["result"], result["changes"]) == (True, {})
    assert config.read_text() == OLD


@pytest.mark.parametrize("test", [False, True])
def test_ssconf_is_what_the_master_says_and_no_more(tmp_path: Path, test: bool) -> None:
    folder = tmp_path / "ssconf"
    folder.mkdir()
    for name in ("ssconf_stale", "ssconf_same", "others"):
        (folder / name).write_text("x\n")
    (folder / "ssconf_same").chmod(0o644)
    values = {"ssconf_new": "a\nb", "ssconf_empty": "", "ssconf_same": "x"}
    result = config_states(test=test, ssconf=values).ssconf_copied(str(folder))
    assert result["changes"] == {
        "ssconf_new": "written",
        "ssconf_empty": "written",
        "ssconf_stale": "removed",
    }
    assert (folder / "ssconf_stale").exists() is test
    if not test:
        assert (folder / "ssconf_new").read_text() == "a\nb\n"
        assert (folder / "ssconf_empty").read_text() == ""
        assert (folder / "others").exists()
        assert config_states(ssconf=values).ssconf_copied(str(folder))["changes"] == {}


def given(data: bytes = SECRET.encode(), **other: str) -> dict[str, str]:
    """A file, as the external pillar gives it."""
    contents = base64.b64encode(data).decode()
    return {"contents": contents, "user": "root", "group": "brine", "mode": "0640", **other}


@pytest.mark.parametrize("test", [False, True])
def test_files_are_put_in_place_and_nothing_of_them_is_told(tmp_path: Path, test: bool) -> None:
    old, new, mode = (tmp_path / name for name in ("old", "sub/new", "mode"))
    old.write_text("before")
    mode.write_text(SECRET)
    mode.chmod(0o600)
    files = {str(file): given() for file in (old, new, mode)}
    result = config_states(test=test, files=files, cache=tmp_path).files_copied("files")
    changed = {str(old): "replaced", str(new): "written", str(mode): "owner or mode changed"}
    assert result["changes"] == changed
    assert result["result"] is (None if test else True)
    assert SECRET not in json.dumps(result)
    if not test:
        assert {file.read_text() for file in (old, new, mode)} == {SECRET}
        assert {file.stat().st_mode & 0o777 for file in (old, new, mode)} == {0o640}
        again = config_states(files=files, cache=tmp_path).files_copied("files")
        assert again["changes"] == {}


def test_a_file_that_can_not_be_written_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    files = {
        str(tmp_path / "folder"): given(),
        str(tmp_path / "foreign"): given(user="nobody-here"),
        str(tmp_path / "sound"): given(),
    }
    result = config_states(files=files, cache=tmp_path).files_copied("files")
    assert result["result"] is False
    assert result["changes"] == {str(tmp_path / "sound"): "written"}
    assert "no user nobody-here" in result["comment"]
    assert len(result["comment"].splitlines()) == 3


@pytest.mark.parametrize("test", [False, True])
def test_a_file_that_is_not_given_any_more_goes_if_this_state_has_created_it(
    tmp_path: Path, test: bool
) -> None:
    by_hand, web1, web2, lost, below = (
        tmp_path / name for name in ("by-hand", "web1", "web2", "lost", "folder/lost")
    )
    by_hand.write_text("before")
    names = (by_hand, web1, web2, lost, below)
    files = {str(file): given() for file in names}
    config_states(files=files, cache=tmp_path).files_copied("files")
    unread = [str(lost), str(below.parent)]
    left: dict[str, Any] = {"files": {str(web2): given()}, "unread": unread, "cache": tmp_path}
    result = config_states(test=test, **left).files_copied("files")
    assert result["changes"] == {str(web1): "removed"}
    assert result["result"] is (None if test else True)
    assert [file.exists() for file in names] == [True, test, True, True, True]
    if not test:
        assert config_states(**left).files_copied("files")["changes"] == {}
        # By now somebody else has put it there.
        web1.write_text("by hand")
        assert config_states(**left).files_copied("files")["changes"] == {}
        left["unread"] = []
        result = config_states(**left).files_copied("files")
        assert result["changes"] == {str(lost): "removed", str(below): "removed"}


@pytest.mark.parametrize("test", [False, True])
def test_clean_removes_what_this_state_has_created(tmp_path: Path, test: bool) -> None:
    by_hand, created, gone = (tmp_path / name for name in ("by-hand", "new/line\n", "gone"))
    by_hand.write_text("before")
    files = {str(file): given() for file in (by_hand, created, gone)}
    config_states(files=files, cache=tmp_path).files_copied("files")
    gone.unlink()
    result = config_states(test=test, cache=tmp_path, serial=0).files_removed("files")
    assert result["changes"] == {str(created): "removed"}
    assert result["result"] is (None if test else True)
    assert [file.exists() for file in (by_hand, created)] == [True, test]
    assert (tmp_path / "salt-files").exists() is test
    if not test:
        assert config_states(cache=tmp_path).files_removed("files")["changes"] == {}


def test_clean_removes_folders_that_are_empty_then_but_not_that_of_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etc = tmp_path / "etc"
    files = {str(etc / name): given() for name in ("users", "vnc/web1", "vnc/web2")}
    config_states(files=files, cache=tmp_path).files_copied("files")
    states = config_states(cache=tmp_path)
    monkeypatch.setattr(states, "_ETC", str(etc))
    states.files_removed("files")
    assert [*etc.rglob("*")] == []
    assert etc.exists()


def test_a_file_that_was_created_by_a_run_that_was_killed_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web1, replace = tmp_path / "web1", os.rename

    def killed(old: str, new: str) -> None:
        replace(old, new)
        if new == str(web1):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            files = {str(web1): given()}
            config_states(files=files, cache=tmp_path).files_copied("files")
    result = config_states(files={}, cache=tmp_path).files_copied("files")
    assert result["changes"] == {str(web1): "removed"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
@pytest.mark.parametrize("how", ["theirs", "writable", "sticky", "group", "link", "below"])
def test_a_path_that_others_than_root_can_lead_elsewhere_is_refused(
    tmp_path: Path, how: str
) -> None:
    folder, target = tmp_path / "folder", tmp_path / "target"
    for one in (folder, target):
        one.mkdir()
    if how in ("theirs", "below"):
        os.chown(folder, 1000, 1000)
    elif how == "link":
        folder.rmdir()
        folder.symlink_to(target)
        os.lchown(folder, 1000, 1000)
    else:
        folder.chmod({"writable": 0o777, "sticky": 0o1777, "group": 0o775}[how])
    file, sound = folder / ("sub/web1" if how == "below" else "web1"), tmp_path / "sound"
    files = {str(one): given() for one in (file, sound)}
    result = config_states(files=files, cache=tmp_path).files_copied("files")
    assert result["result"] is False
    assert result["changes"] == {str(sound): "written"}
    assert str(folder) in result["comment"]
    assert [*folder.iterdir(), *target.iterdir()] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_file_that_this_state_has_created_is_not_removed_where_others_lead(
    tmp_path: Path,
) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    files = {str(one / "web1"): given() for one in (folder, other)}
    files[str(tmp_path / "web2")] = given()
    config_states(files=files, cache=tmp_path).files_copied("files")
    (folder / "web1").unlink()
    folder.rmdir()
    folder.symlink_to("other")
    os.lchown(folder, 1000, 1000)
    left = {str(other / "web1"): given()}
    states = config_states(files=left, cache=tmp_path)
    result = states.files_copied("files")
    assert (result["result"], str(folder) in result["comment"]) == (False, True)
    assert (other / "web1").exists()
    assert not (tmp_path / "web2").exists()  # one that can't be removed holds up no other
    folder.unlink()
    folder.symlink_to("other")  # root's own
    assert states.files_copied("files")["result"] is True


# Instances of the cluster's configuration.


def spec(name: str, admin_state: str = "up", **other: Any) -> dict[str, Any]:
    whole = {"name": name, "admin_state": admin_state, "admin_state_source": "admin"}
    return {**whole, "user_shutdown": "stop", "start_order": 100, **other}


def row(name: str, admin_state: str = "up", *, before: Any = "same", **other: Any) -> Any:
    """A row of ``brine instance define --from-config``."""
    now = spec(name, admin_state)
    before = now if before == "same" else before
    return {"name": name, "changed": before != now, "before": before, "spec": now, **other}


def seen(name: str, status: str, oper_state: str, admin_state: str = "up", **other: Any) -> Any:
    """A row of ``brine instance list``."""
    found: dict[str, Any] = {
        "name": name,
        "status": status,
        "oper_state": oper_state,
        "admin_state": admin_state,
    }
    found |= {"admin_state_source": "admin", "why": "", "held_back": None}
    return {**found, "spec": spec(name, admin_state), **other}


@dataclass
class Brine:
    """A ``brine`` command of a node with these instances."""

    rows: Sequence[Any]
    seen: Sequence[Any] = ()
    elsewhere: Sequence[Any] = ()
    removed: Sequence[str] = ()
    failing: str = ""
    asked: list[str] = field(default_factory=list)
    done: list[list[str]] = field(default_factory=list)
    given: list[str] = field(default_factory=list)

    def run_all(self, command: list[str], stdin: str = "", **_: Any) -> dict[str, Any]:
        """Answer as Salt's cmd.run_all does."""
        verb, rest = command[2], command[3:-1]
        self.asked.append(verb)
        if verb in ("list", "info"):
            found = [*self.seen] if verb == "list" else self.seen[0]
            return {"retcode": 0, "stdout": json.dumps(found), "stderr": ""}
        self.given.append(stdin)
        if "--dry-run" not in rest:
            self.done.append([verb, *rest])
        if verb == "define":
            states = {one["name"]: one for one in self.seen} if "--dry-run" in rest else {}
            # A configuration that is given may be of some instances only.
            rows = [one for one in self.rows if stdin[:1] != "{" or one["name"] in stdin]
            left = {one.removeprefix("--but=") for one in rest}
            rows = [one for one in rows if one["name"] not in left]
            rows = [{**one, "state": states.get(one["name"])} for one in rows]
            said = {"instances": rows, "elsewhere": [*self.elsewhere], "removed": [*self.removed]}
            is_bad = any("error" in one for one in self.rows)
            return {"retcode": int(is_bad), "stdout": json.dumps(said), "stderr": "told above"}
        names = [one for one in rest if not one.startswith("--")]
        results = [
            {"name": one, "error": f"{one}: its guest does not answer", "hint": None}
            if one == self.failing
            else {"name": one, "changed": True, "status": "running"}
            for one in names
        ]
        return {"retcode": 0, "stdout": json.dumps({"instances": results}), "stderr": ""}


def from_config(
    brine: Brine,
    *,
    test: bool = False,
    distributed: Any = None,
    is_there: bool = True,
    ran: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """The result of the state.

    :param ran: the results of the states before it.
    """
    functions = {
        "brine.ask": execution_module(brine.run_all).ask,
        "file.file_exists": lambda path: is_there or path.startswith("/usr/lib/systemd/"),
    }
    module = load(
        "states",
        "brine_instance",
        __opts__={"test": test},
        __context__={},
        __lowstate__=(),
        __running__=ran or {},
        __pillar__={"brine": {"distributed": distributed} if distributed else {}},
        __salt__=functions,
    )
    result: dict[str, Any] = module.from_config("instances", **arguments)
    return result


@pytest.mark.parametrize("test", [False, True])
def test_instances_of_the_cluster_are_defined_stopped_and_started(test: bool) -> None:
    nic = {"kind": "nic", "uuid": "u", "mac": "m", "link": "br0"}
    old = spec("live") | {"memory_mib": 1}
    rows = [
        row("new", before=None),
        row("live", before=old, attached=[nic], detached=[], restart_pending=["memory_mib"]),
        row("down1", "down"),
        row("down2", "down"),
        row("same"),
    ]
    there = [
        seen("new", "ERROR_down", "down"),
        *(seen(one, "running", "running") for one in ("live", "down1", "down2", "same")),
    ]
    brine = Brine(rows, there[1:] if test else there)
    result = from_config(brine, test=test)
    assert result["result"] is (None if test else True)
    assert {name: [*one] for name, one in result["changes"].items()} == {
        "new": ["spec", "status"],
        "live": ["attached"],
        "down1": ["status"],
        "down2": ["status"],
    }
    assert "live needs a reboot: memory_mib" in result["comment"]
    assert brine.done == (
        []
        if test
        else [
            ["define", "--from-config", "--live"],
            ["stop", "down1", "down2"],
            ["start", "--keep-tries", "new"],
        ]
    )


@pytest.mark.parametrize("test", [False, True])
def test_instances_that_are_as_they_should_be_take_one_command(test: bool) -> None:
    brine = Brine(
        [row("web1"), row("web2", "down")],
        [
            seen("web1", "running", "running"),
            seen("web2", "ADMIN_down", "down", "down"),
        ],
    )
    result = from_config(brine, test=test)
    assert (result["result"], result["changes"], brine.asked) == (True, {}, ["define"])


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (seen("web1", "USER_down", "S", why="its user shut it down"), "its user shut it down"),
        (seen("web1", "ERROR_down", "down", held_back="given up after 5 tries"), "given up"),
        (seen("web1", "USER_down", "down", admin_state_source="user"), "shut down by its user"),
    ],
)
def test_what_holds_a_start_back_is_followed_and_told(here: Any, said: str) -> None:
    brine = Brine([row("web1")], [here])
    result = from_config(brine)
    assert (result["result"], result["changes"], brine.done) == (True, {}, [])
    assert said in result["comment"]


def test_one_that_fails_stops_no_other() -> None:
    bad = {"name": "bad", "error": "bad: its disk is not in the configuration", "hint": None}
    live = row("live", live_errors=["live: there is no bridge br9"])
    down = [row("down1", "down"), row("down2", "down")]
    brine = Brine(
        [bad, live, *down],
        [seen(one, "running", "running") for one in ("live", "down1", "down2")],
        failing="down1",
    )
    result = from_config(brine)
    assert result["result"] is False
    assert [*result["changes"]] == ["down2"]
    assert result["comment"].splitlines()[:3] == [
        "bad: its disk is not in the configuration",
        "live: there is no bridge br9",
        "down1: its guest does not answer",
    ]


@pytest.mark.parametrize("test", [False, True])
@pytest.mark.parametrize("is_given", [False, True])
def test_one_that_pillar_declares_itself_is_left_alone(
    tmp_path: Path, is_given: bool, test: bool
) -> None:
    config = tmp_path / "config.data"
    names = ("web1", "web2")
    whole: Any = {"serial_no": 7, "instances": {f"uuid-{one}": {"name": one} for one in names}}
    config.write_text(json.dumps(whole))
    brine = Brine(
        [row("web1", before=None), row("web2", before=None)],
        [seen("web1", "ERROR_down", "down"), seen("web2", "ERROR_down", "down")],
    )
    result = from_config(
        brine,
        test=test,
        declared=["web2", "db1"],
        config="" if is_given else str(config),
        distributed={"configuration": json.dumps(whole)},
    )
    assert result["result"] is False
    assert [*result["changes"]] == ["web1"]
    said = result["comment"].splitlines()[0]
    assert said.startswith("web2: declared both in brine:instance:instances and")
    if not test:
        define, start = brine.done
        source = ["--config", "-"] if is_given else []
        assert define == ["define", "--from-config", "--live", *source, "--but=web2"]
        assert start == ["start", "--keep-tries", "web1"]
        assert brine.given[:2] == [json.dumps(whole) if is_given else ""] * 2


def test_a_node_that_is_no_candidate_uses_what_it_is_given() -> None:
    given = {"configuration": SECRET}
    brine = Brine([row("web1", before=None)], [seen("web1", "running", "running")])
    result = from_config(brine, distributed=given, config="", node="node2.example.com")
    command = ["--node", "node2.example.com", "--config", "-"]
    assert brine.done == [["define", "--from-config", "--live", *command]]
    assert brine.given == [SECRET, SECRET]
    assert SECRET not in json.dumps(result)


@pytest.mark.parametrize(("oper_state", "result"), [("running", False), ("down", True)])
def test_one_that_is_another_nodes_by_now_does_not_start_here(
    oper_state: str, result: bool
) -> None:
    here = seen("web1", "ADMIN_down", oper_state, "down")
    brine = Brine([], [here], elsewhere=[{"name": "web1", "node": "node2"}])
    done = from_config(brine)
    assert done["result"] is result
    assert bool(done["changes"]) is result
    assert bool(brine.done) is result


@pytest.mark.parametrize("test", [False, True])
def test_one_that_the_cluster_has_removed_is_undefined(test: bool) -> None:
    brine = Brine([], removed=["web9"])
    told = from_config(brine, test=test)
    assert told["result"] is (None if test else True)
    assert told["changes"] == {"web9": {"spec": {"old": "defined", "new": None}}}
    assert bool(brine.done) is not test


def test_a_test_run_before_there_is_a_configuration_says_so() -> None:
    brine = Brine([])
    result = from_config(brine, test=True, is_there=False)
    assert (result["result"], result["changes"], brine.given) == (None, {}, [])


@pytest.mark.parametrize(
    "tag",
    [
        "brine_config_|-config_|-config_|-applied",
        "file_|-config_|-/var/lib/brine/config.data_|-managed",
    ],
)
def test_a_test_run_that_would_change_the_configuration_says_no_more(tag: str) -> None:
    brine = Brine([row("web1")], [seen("web1", "running", "running")])
    others = {"file_|-other_|-/etc/other_|-managed": {"result": None}}
    result = from_config(brine, test=True, ran={**others, tag: {"result": None}})
    assert (result["result"], result["changes"], brine.given) == (None, {}, [])
    assert "the configuration" in result["comment"]
    for test, ended in ((True, True), (False, None)):
        result = from_config(brine, test=test, ran={**others, tag: {"result": ended}})
        assert (result["result"], result["changes"]) == (True, {})
