"""Settings files: what is good, and how each mistake is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from brine.common.settings import SettingsError, load, setting
from brine.kvmd.settings import KvmdSettings, load_settings


@dataclass(frozen=True)
class Sample:
    name: str = "x"
    folder: Path = Path("/somewhere")
    count: int = setting(3, minimum=1, maximum=9)
    pause_s: float = setting(1.5, minimum=0)
    lock: bool = False
    level: str = setting("info", choices=("debug", "info"))


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "sample.toml"
    file.write_text(text)
    return file


def test_every_key_has_a_default(tmp_path: Path) -> None:
    assert load(Sample, tmp_path / "absent.toml") == Sample()
    assert load(Sample, write(tmp_path, "")) == Sample()


def test_a_file_that_was_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.toml: there is no such file"):
        load(Sample, tmp_path / "absent.toml", required=True)


def test_values_are_typed(tmp_path: Path) -> None:
    file = write(tmp_path, 'name="y"\nfolder="/x"\ncount=9\npause_s=2\nlock=true\nlevel="debug"')
    loaded = load(Sample, file)
    assert loaded == Sample("y", Path("/x"), 9, 2.0, True, "debug")
    assert type(loaded.pause_s) is float


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("cuont = 1", "cuont: there is no such setting", "did you mean count?"),
        ("zzz = 1", "zzz: there is no such setting", "known are: count, folder,"),
        ("count = '1'", "count: must be a whole number, but is '1'", None),
        ("count = true", "count: must be a whole number, but is True", None),
        ("count = 1.5", "count: must be a whole number", None),
        ("count = 0", "count: must be at least 1, but is 0", None),
        ("count = 10", "count: must be at most 9, but is 10", None),
        ("pause_s = -1", "pause_s: must be at least 0, but is -1.0", None),
        ("pause_s = nan", "pause_s: must be a number, but is nan", None),
        ("pause_s = inf", "pause_s: must be a number, but is inf", None),
        ("lock = 1", "lock: must be true or false, but is 1", None),
        ("folder = 'relative'", "folder: must be an absolute path", None),
        ("name = ['a']", "name: must be a string", None),
        ("level = 'inf'", "level: must be one of debug, info, but is 'inf'", "did you mean info?"),
        ("[count]\nx = 1", "count: must be a whole number", None),
        ("count = ", "not valid TOML", None),
        ("level = info", "not valid TOML", "strings need quotes"),
        ("count = 1\ncount = 2", "not valid TOML", None),
    ],
)
def test_each_mistake_is_named(tmp_path: Path, text: str, message: str, hint: str | None) -> None:
    file = write(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        load(Sample, file)
    assert str(caught.value).startswith(f"{file}: {message}")
    assert "\n" not in str(caught.value)
    if hint:
        assert hint in (caught.value.hint or "")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(b"name = '\xff'")
    with pytest.raises(SettingsError, match="not valid UTF-8"):
        load(Sample, file)
    with pytest.raises(SettingsError, match="can't be read: Is a directory"):
        load(Sample, tmp_path)


def test_kvmds_defaults_are_those_of_the_design(tmp_path: Path) -> None:
    settings = load_settings(tmp_path / "absent", required=False)
    assert settings == KvmdSettings()
    assert (settings.control_dir, settings.suffix) == (Path("/run/brine/ctrl"), ".kvmd")
    assert settings.powerdown_stale_s == 600


@pytest.mark.parametrize("suffix", ["", ".", "/x", ".a/b", ".shutdown", ".stopping"])
def test_a_suffix_must_be_fit_for_a_socket(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(SettingsError, match="suffix: "):
        load_settings(write(tmp_path, f'suffix = "{suffix}"'), required=True)
