"""The settings of ``/etc/brine/instance.toml``, as Salt has them checked first."""

from __future__ import annotations

from pathlib import Path

import pytest

from brine.instance import settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('parallel_starts = 8\nuid_pool = "4000-4099,5000"', ""),
        ("parallel_start = 8", "parallel_start: there is no such setting"),
        ("parallel_starts = 0", "parallel_starts: must be at least 1"),
        ('uid_pool = "4000-"', "is no range of user ids"),
        ("uid_pool =", "not valid TOML"),
        (None, "there is no such file"),
    ],
)
def test_what_instances_could_not_be_started_with_is_refused(
    text: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "new.toml"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr("sys.argv", ["settings", str(file)])
    if not said:
        settings.main()
        return
    with pytest.raises(SystemExit) as ended:
        settings.main()
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(f"brine-instance: error: {file}: ")
    assert said in error
