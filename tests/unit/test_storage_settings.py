"""`storage.toml`, and which folders can be storage units."""

from __future__ import annotations

from pathlib import Path

import pytest

from brine.common import paths
from brine.common.settings import SettingsError
from brine.storage.settings import folder_fault, load_settings


@pytest.mark.parametrize(
    "path", ["/srv/vms", "/var/lib/vms", "/mnt/a/b", "/data", "/homes", "/opt/x"]
)
def test_folders_of_their_own_can_be_units(path: str) -> None:
    assert folder_fault(path) is None


@pytest.mark.parametrize(
    "path",
    [
        *("", "srv/vms", "/srv/vms/", "/srv//vms", "/srv/./vms", "/srv/../etc", "/srv/a\nb"),
        *("/", "/srv", "/var", "/var/lib", "/mnt", "/etc", "/usr/local/vms", "/home/joe"),
        *("/var/lib/brine/x", "/tmp/vms", "/run/vms", "/dev/shm", "/proc", "/srv/" + "a" * 1100),
    ],
)
def test_folders_of_the_system_and_odd_names_can_not(path: str) -> None:
    assert folder_fault(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('directories = "/srv/vms"', "directories"),
        ("directories = [1]", "directories/0"),
        ('directories = ["/etc"]', "/etc"),
        ('directories = ["/srv/a", "/srv/a"]', "the same folder"),
        ('directories = ["/srv/a/b", "/srv/a"]', "the same folder"),
        ("directory = []", "directories"),
    ],
)
def test_settings_that_are_not_good_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.setattr(paths, "ETC_DIR", tmp_path)
    (tmp_path / "storage.toml").write_text(text)
    with pytest.raises(SettingsError) as fault:
        load_settings()
    assert expected in f"{fault.value} {fault.value.hint}"


def test_two_folders_with_a_common_beginning_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "ETC_DIR", tmp_path)
    assert load_settings().directories == ()
    (tmp_path / "storage.toml").write_text('directories = ["/srv/vm", "/srv/vms"]')
    assert load_settings().directories == ("/srv/vm", "/srv/vms")
