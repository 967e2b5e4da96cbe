"""Asking xl, and telling it: by number, and only what is still there."""

from __future__ import annotations

from pathlib import Path

import pytest

from brine.instance.xen import xl
from brine.instance.xen.xl import XlError
from lab.scripted_xl import ScriptedXl

UUID = "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f"
OTHER = "6f1b5c1e-8a3b-4a50-9d0e-000000000000"


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedXl:
    return ScriptedXl(tmp_path / "bin", monkeypatch)


def test_a_domain_is_known_by_its_uuid(scripted: ScriptedXl) -> None:
    scripted.domain("web1", 3, "-b----", OTHER)
    assert xl.domain_of(UUID) is None
    scripted.domain("web2", 4, "---s--", UUID, 0)
    found = xl.domain_of(UUID)
    assert found
    assert (found.number, found.reason) == (4, 0)


def test_of_several_the_one_that_lives_counts(scripted: ScriptedXl) -> None:
    scripted.domain("(null)", 3, "--ps-d", UUID)
    scripted.domain("web1", 4, "---s--", UUID, 0)
    found = xl.domain_of(UUID)
    assert found
    assert found.number == 4
    scripted.domain("web1", 2, "-b----", UUID)
    found = xl.domain_of(UUID)
    assert found
    assert found.number == 2


def test_a_row_of_ours_that_nobody_knows_is_an_error(scripted: ScriptedXl) -> None:
    scripted.rows([f"web1 is on holiday {OTHER}", f"web2 is, too {UUID}"])
    assert len(xl.domains().unknown) == 2
    with pytest.raises(XlError, match="not known here"):
        xl.domain_of(UUID)


def test_only_what_is_still_there_is_destroyed(scripted: ScriptedXl) -> None:
    scripted.domain("web1", 3, "---s--", UUID, 0)
    before = xl.domain_of(UUID)
    assert before
    assert xl.destroy(before)
    assert scripted.asked() == ["destroy 3"]
    assert not xl.destroy(before)
    # Another one has its number by now.
    scripted.domain("web2", 3, "---s--", OTHER, 0)
    assert not xl.destroy(before)
    assert scripted.asked() == ["destroy 3"]


def test_what_xl_refuses_is_told_in_a_line(scripted: ScriptedXl) -> None:
    scripted.refuse(
        "shutdown",
        "libxl: error: libxl_domain.c:850:pvcontrol_cb: guest didn't acknowledge control request\n"
        "shutdown failed (rc=-9)\n",
    )
    with pytest.raises(XlError) as caught:
        xl.shut_down(3, timeout_s=10)
    assert str(caught.value) == "xl shutdown 3: guest didn't acknowledge control request"
    scripted.refuse("shutdown", "")
    with pytest.raises(XlError, match=r"^xl shutdown 3: 1$"):
        xl.shut_down(3, timeout_s=10)


def test_a_node_without_xl_has_no_domains_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert xl.domains().domains == ()
    with pytest.raises(XlError, match="No such file") as caught:
        xl.shut_down(3, timeout_s=10)
    assert "xen-utils" in (caught.value.hint or "")


def test_an_xl_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "xl"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(XlError, match=r"^xl shutdown 3: no answer within 0.1 s"):
        xl.shut_down(3, timeout_s=0.1)
