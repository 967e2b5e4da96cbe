"""What may stand in ``/etc/brine/instance.toml``, as Salt has it checked before it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from brine.common.settings import SettingsError
from brine.instance import settings


def test_sound_settings_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "new.toml"
    file.write_text('parallel_starts = 8\nuid_pool = "4000-4099,5000"\n')
    monkeypatch.setattr("sys.argv", ["settings", str(file)])
    settings.main()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("parallel_start = 8", "parallel_start: there is no such setting"),
        ("parallel_starts = 0", "parallel_starts: must be at least 1"),
        ('uid_pool = "4000-"', "uid_pool: .* is no range of user ids"),
        ("uid_pool =", "not valid TOML"),
    ],
)
def test_what_instances_could_not_be_started_with_is_refused(
    text: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "new.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=said):
        settings.check(file)


def test_a_mistake_is_one_line_and_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["settings", "/nowhere.toml"])
    with pytest.raises(SystemExit) as ended:
        settings.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said == "brine-instance: error: /nowhere.toml: there is no such file\n"
