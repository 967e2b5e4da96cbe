"""Operators' scripts around a NIC's wiring."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from brine.common import paths
from brine.hotplug.net import scripts as scripts_module
from brine.hotplug.net.scripts import Phase, ScriptError, run_scripts, scripts
from lab.waiting import wait_for


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of scripts that is this user's alone, who stands for root."""
    made = tmp_path / "nic.d"
    made.mkdir(mode=0o755)
    monkeypatch.setattr(paths, "NIC_SCRIPTS_DIR", made)
    return made


def script(folder: Path, name: str, text: str, mode: int = 0o755) -> Path:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(mode)
    return file


def test_they_run_in_the_order_of_their_names(folder: Path, tmp_path: Path) -> None:
    for name in ("20-b", "10-a", "30_c"):
        script(folder, name, f"echo {name} $1 $INSTANCE >>{tmp_path}/calls")
    run_scripts(Phase.PRE_UP, {"INSTANCE": "web1"})
    called = (tmp_path / "calls").read_text().splitlines()
    assert called == [f"{name} pre-up web1" for name in ("10-a", "20-b", "30_c")]
    shutil.rmtree(folder)  # a node without any
    run_scripts(Phase.UP, {})


def test_only_names_that_run_parts_takes_and_only_executables(folder: Path) -> None:
    good = script(folder, "10-good", "true")
    for name in ("10-good~", "10-good.dpkg-old", ".hidden", "notes.txt"):
        script(folder, name, "true")
    script(folder, "README", "true", 0o644)
    (folder / "folder").mkdir()
    (folder / "dangling").symlink_to(folder / "nowhere")
    assert scripts() == [good]


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_what_others_may_write_is_not_run_and_told(
    folder: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    script(folder, "10-open", "exit 1", mode)
    run_scripts(Phase.UP, {})
    assert f"10-open is not run: others than root may write {folder}/10-open" in caplog.text
    script(folder, "10-good", "exit 1")
    folder.chmod(0o777)
    run_scripts(Phase.UP, {})
    assert f"no script in it is run: others than root may write {folder}" in caplog.text


def test_a_link_is_as_good_as_where_it_leads(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for place, mode in ((good, 0o755), (bad, 0o777)):
        place.mkdir()
        place.chmod(mode)
        script(place, "script", "true")
        (folder / place.name).symlink_to(place / "script")
    assert scripts() == [folder / "good"]
    assert "bad is not run" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="files of others take root")
def test_another_users_script_is_not_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.chown(script(folder, "10-theirs", "exit 1"), 65534, -1)
    run_scripts(Phase.UP, {})
    assert "10-theirs belongs to user 65534, not to root" in caplog.text


def test_their_environment_is_what_they_are_told_and_no_more(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    script(folder, "env", f"env | sort >{tmp_path}/env; pwd >{tmp_path}/pwd")
    run_scripts(Phase.UP, {"INSTANCE": "web1"})
    names = [line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()]
    assert set(names) - {"PWD", "_", "SHLVL"} == {"INSTANCE", "LANG", "PATH"}
    assert (tmp_path / "pwd").read_text() == "/\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/bin/sh\necho no such network >&2; exit 3", "failed with status 3: no such network"),
        ("#!/bin/sh\nkill -TERM $$", "ended by signal 15"),
        ("#!/bin/sh\nexec /no/such/program", "failed with status 127"),
        ("true", "can't be run: Exec format error"),
    ],
)
def test_one_that_fails_stops_the_rest_and_is_quoted(
    folder: Path, tmp_path: Path, text: str, said: str
) -> None:
    script(folder, "10-bad", "").write_text(text)
    script(folder, "20-next", f"touch {tmp_path}/called")
    with pytest.raises(ScriptError, match=f"10-bad up: {said}"):
        run_scripts(Phase.UP, {})
    assert not (tmp_path / "called").exists()


def test_one_that_takes_too_long_is_ended_with_all_it_started(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts_module, "TIMEOUT_S", 2)
    script(folder, "slow", f"sleep 60 & echo $! >{tmp_path}/child; wait")
    with pytest.raises(ScriptError, match="took longer than 2 s"):
        run_scripts(Phase.UP, {})
    child = Path("/proc", (tmp_path / "child").read_text().strip())

    def ended() -> bool:
        # Whoever adopted it may not have waited for it yet.
        try:
            return "\nState:\tZ" in (child / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_for("the end of what the script started", ended)


def test_one_may_leave_something_running(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts_module, "TIMEOUT_S", 4)
    script(folder, "starts", "sleep 5 &")
    run_scripts(Phase.UP, {})


def test_what_they_write_is_logged_for_the_instance(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script(folder, "10-talk", "echo hello; printf 'odd \\033[31m\\n'")
    with caplog.at_level(logging.INFO):
        run_scripts(Phase.UP, {"INSTANCE": "web1"})
    assert [record.message for record in caplog.records] == [
        f"{folder}/10-talk up: hello",
        f"{folder}/10-talk up: odd \\x1b[31m",
    ]
    assert caplog.records[0].__dict__["fields"]["BRINE_INSTANCE"] == "web1"
