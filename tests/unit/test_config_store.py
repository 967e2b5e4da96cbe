"""The store: serial numbers, kept versions, damage and its repair."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from brine.common import files
from brine.common.locks import LockedError
from brine.config.model import Configuration
from brine.config.schema import ConfigError
from brine.config.store import KEPT_VERSIONS, ConfigStore, CorruptError
from lab.ganeti_config import ganeti_config, uuid_of

NOW = 1800000000.0
FILES = [".config.data.lock", "config.data", "config.versions"]


@pytest.fixture
def store(tmp_path: Path) -> ConfigStore:
    """A store of four instances, of serial 42."""
    store = ConfigStore(tmp_path / "config.data", clock=lambda: NOW)
    with store.writing() as writer:
        assert writer.current is None
        writer.write(Configuration.from_json(ganeti_config()))
    return store


@pytest.fixture
def aged(store: ConfigStore) -> ConfigStore:
    """A store whose current version is 46, with 42 to 45 kept."""
    for number in range(4):
        tag(store, str(number))
    return store


def written(path: Path) -> tuple[int, int]:
    """A value that changes when a file is written, and not when it is read."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def tag(store: ConfigStore, text: str) -> Configuration:
    """Change one instance."""
    with store.writing() as writer:
        assert writer.current
        key = uuid_of("instance", 1)
        instance = replace(writer.current.instances[key], tags=[text])
        instances = writer.current.instances | {key: instance}
        return writer.write(replace(writer.current, instances=instances))


def put_by_hand(store: ConfigStore, data: bytes) -> None:
    """Another file in the place of the current one, as cp and mv do."""
    store.path.unlink()
    store.path.write_bytes(data)


def serials(store: ConfigStore) -> list[int]:
    """The serial numbers of the kept versions."""
    return [version.serial_no for version in store.versions()]


def fill_disk(patch: pytest.MonkeyPatch) -> None:
    """Have the disk be full from now on."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(os, "fsync", full)


def test_a_first_configuration_is_stored_as_it_is(store: ConfigStore) -> None:
    assert json.loads(store.path.read_bytes()) == ganeti_config()
    assert store.path.stat().st_mode & 0o777 == 0o640
    assert store.versions() == []


def test_serials_rise_where_something_changed(store: ConfigStore) -> None:
    old, new = store.read(), tag(store, "blue")
    assert store.read() == new
    assert (new.serial_no, new.mtime) == (43, NOW)
    assert new.cluster.serial_no == old.cluster.serial_no + 1
    changed = new.instance("instance1")
    assert (changed.serial_no, changed.mtime) == (2, NOW)
    assert changed.ctime == old.instance("instance1").ctime
    assert new.instance("instance2") == old.instance("instance2")
    assert new.nodes == old.nodes
    before = written(store.path)
    tag(store, "blue")
    assert written(store.path) == before


def test_a_new_object_is_stamped(store: ConfigStore) -> None:
    with store.writing() as writer:
        assert writer.current
        made = replace(writer.current.node("node1"), uuid="n", name="n", ctime=0.0, mtime=0.0)
        new = writer.write(replace(writer.current, nodes=writer.current.nodes | {"n": made}))
    assert (new.nodes["n"].serial_no, new.nodes["n"].ctime) == (1, NOW)


def test_a_number_becomes_a_truth_value(store: ConfigStore) -> None:
    for value in (1, True):
        with store.writing() as writer:
            assert writer.current
            kvm = writer.current.cluster.hvparams["kvm"] | {"acpi": value}
            cluster = replace(writer.current.cluster, hvparams={"kvm": kvm})
            writer.write(replace(writer.current, cluster=cluster))
    assert store.read().serial_no == 44
    assert json.loads(store.path.read_bytes())["cluster"]["hvparams"]["kvm"]["acpi"] is True


def test_the_last_versions_are_kept(store: ConfigStore) -> None:
    for number in range(KEPT_VERSIONS + 3):
        tag(store, str(number))
    assert serials(store) == list(range(54, 54 - KEPT_VERSIONS, -1))
    assert store.read_version(50).instance("instance1").tags == ["7"]
    with pytest.raises(ConfigError, match="version 42 is not kept"):
        store.read_version(42)


def test_restore_goes_back_in_content_and_on_in_serials(store: ConfigStore) -> None:
    tag(store, "one")
    with store.writing() as writer:
        assert writer.current
        writer.write(replace(writer.current, instances={}, disks={}))
    done = store.restore(43)
    assert done.old
    assert done.old.instances == {}
    assert (done.new.serial_no, done.new.cluster.serial_no) == (45, 4)
    restored = done.new.instance("instance1")
    assert restored.tags == ["one"]
    assert restored.serial_no > 2
    assert store.read() == done.new


# What somebody else has done to the file.


@pytest.mark.parametrize("damage", [b"", b'{"cluster": 5}'])
def test_a_damaged_file_is_named_and_never_written_over(store: ConfigStore, damage: bytes) -> None:
    tag(store, "blue")
    put_by_hand(store, damage)
    with pytest.raises(CorruptError, match=r"config\.data: "):
        store.read()
    with pytest.raises(CorruptError) as caught:
        tag(store, "red")
    assert caught.value.hint == (
        "copy it from another master candidate; if none has it, brine config restore 42, "
        "which loses what was changed after that version"
    )
    assert store.path.read_bytes() == damage


def test_damaged_files_are_kept_aside_by_a_restore(store: ConfigStore) -> None:
    tag(store, "blue")
    whole = store.path.read_bytes()
    for end in ("", "-2", "-3"):  # all in the same second
        damage = whole[:-50] + end.encode()
        put_by_hand(store, damage)
        done = store.restore(42)
        assert done.old is None
        assert done.aside
        assert done.aside.name == f"config.data.corrupt-20270115T080000Z{end}"
        assert done.aside.read_bytes() == damage
        assert done.new.serial_no > 43
        assert done.new.cluster.serial_no > 2
        assert store.read().instance("instance1").serial_no > 2


@pytest.mark.parametrize(("serial", "expected"), [(1, 44), (1000, 1000)])
def test_a_file_that_was_lost_does_not_take_the_serials_with_it(
    store: ConfigStore, serial: int, expected: int
) -> None:
    before = tag(store, "blue")
    store.path.unlink()
    assert store.restore(42, dry_run=True).new.serial_no == 44
    with store.writing() as writer:
        new = writer.write(Configuration.from_json(ganeti_config(serial=serial)))
    # Of 43, which was lost, nothing is left but the version before it.
    assert new.serial_no == expected
    assert new.cluster.serial_no > before.cluster.serial_no


@pytest.mark.parametrize("serial", [41, 43, 45])
def test_an_older_file_that_was_put_in_place_does_not_take_serials_back(
    aged: ConfigStore, serial: int
) -> None:
    older = json.dumps(ganeti_config(serial=serial)).encode()
    kept = {version.serial_no: version.file.read_bytes() for version in aged.versions()}
    put_by_hand(aged, older)
    assert aged.look().overtaken_by == 45
    with aged.writing() as writer:
        assert writer.current
        new = writer.write(writer.current)  # even if nothing else changes
    # Of 46, which was lost, nothing is left but the versions before it.
    assert (new.serial_no, new.cluster.serial_no) == (47, 47)
    assert aged.read() == new
    assert writer.aside
    assert writer.aside.name == "config.data.older-20270115T080000Z"
    assert writer.aside.read_bytes() == older
    assert {version.serial_no: version.file.read_bytes() for version in aged.versions()} == kept
    assert aged.look().overtaken_by is None
    before = written(aged.path)
    with aged.writing() as writer:
        assert writer.current
        assert writer.write(writer.current) is writer.current
    assert written(aged.path) == before
    assert tag(aged, "on").serial_no == 48
    assert serials(aged)[:2] == [47, 45]


def test_an_older_file_is_restored_from_with_serials_above_all(aged: ConfigStore) -> None:
    put_by_hand(aged, aged.read_version(43).format())
    before = written(aged.path)
    would = aged.restore(44, dry_run=True)
    assert (would.overtaken_by, would.new.serial_no, would.aside) == (45, 47, None)
    assert written(aged.path) == before
    done = aged.restore(44)
    assert done.old
    assert (done.old.serial_no, done.overtaken_by) == (43, 45)
    assert done.aside
    assert done.aside.name.startswith("config.data.older-")
    assert (done.new.serial_no, done.new.cluster.serial_no) == (47, 47)
    assert done.new.instance("instance1").tags == ["1"]
    # Above what it was in any version.
    assert done.new.instance("instance1").serial_no == 3 + 3
    assert aged.restore(43).new.serial_no == 48


@pytest.mark.parametrize("fate", ["overtaken", "lost", "corrupt"])
def test_serials_go_on_although_it_happens_twice(aged: ConfigStore, fate: str) -> None:
    older = aged.read_version(43).format()
    highest = 46
    for _ in range(3):
        put_by_hand(aged, older if fate == "overtaken" else b"{")
        if fate == "lost":
            aged.path.unlink()
        done = aged.restore(44)
        assert done.new.serial_no > highest
        assert done.new.cluster.serial_no > highest
        highest = done.new.serial_no
        assert serials(aged)[-4:] == [45, 44, 43, 42]
        assert aged.look().overtaken_by is None


def test_a_rehearsed_write_writes_nothing(aged: ConfigStore) -> None:
    put_by_hand(aged, aged.read_version(43).format())
    before = written(aged.path)
    with aged.writing(dry_run=True) as writer:
        assert writer.current
        assert writer.write(writer.current).serial_no == 47
    assert written(aged.path) == before
    assert sorted(file.name for file in aged.path.parent.iterdir()) == FILES


def test_another_version_of_the_same_serial_is_not_written_over(store: ConfigStore) -> None:
    store.versions_dir.mkdir()
    other = json.dumps(ganeti_config(serial=42, instances=2)).encode()
    (store.versions_dir / "42").write_bytes(other)
    assert store.look().overtaken_by == 42
    assert tag(store, "blue").serial_no == 44
    assert (store.versions_dir / "42").read_bytes() == other


@pytest.mark.parametrize("by", ["second name", "copy"])
def test_the_current_file_among_the_versions_is_harmless(store: ConfigStore, by: str) -> None:
    """A writer that was killed between keeping the old version and writing the new one."""
    store.versions_dir.mkdir()
    if by == "copy":
        # What was kept, put in the place of a lost 43.
        (store.versions_dir / "42").write_bytes(store.path.read_bytes())
    else:
        os.link(store.path, store.versions_dir / "42")
    assert store.look().overtaken_by is None
    assert store.versions() == []
    assert tag(store, "blue").serial_no == (44 if by == "copy" else 43)
    assert serials(store) == [42]
    assert sorted(file.name for file in store.path.parent.iterdir()) == FILES


def test_a_link_to_the_file_is_another_way_to_the_same_store(
    store: ConfigStore, tmp_path: Path
) -> None:
    link = tmp_path / "elsewhere" / "link"
    link.parent.mkdir()
    link.symlink_to(store.path)
    other = ConfigStore(link)
    with store.writing(), pytest.raises(LockedError):
        with other.writing(timeout_s=0):
            pytest.fail("two writers")
    tag(other, "blue")
    assert link.is_symlink()
    assert store.read().serial_no == 43
    assert serials(store) == [42]


def test_a_link_in_a_circle_is_an_error(tmp_path: Path) -> None:
    link = tmp_path / "config.data"
    link.symlink_to(link)
    with pytest.raises(ConfigError, match=r"config\.data: can't be"):
        ConfigStore(link).read()


def test_a_writer_without_the_lock_is_noticed(store: ConfigStore) -> None:
    with pytest.raises(ConfigError, match="was changed while we had the lock"):
        with store.writing() as writer:
            assert writer.current
            assert store.read() == writer.current  # reading needs no lock
            store.path.write_text(json.dumps(ganeti_config(serial=99)))
            writer.write(replace(writer.current, extra={}))
    assert store.read().serial_no == 99


# What the system does not do.


@pytest.mark.parametrize("fault", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_fault_after_the_new_file_is_there_leaves_the_old_one_among_the_versions(
    store: ConfigStore, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    def fail(folder: Path, **_more: object) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_folder", fail)
        with pytest.raises((ConfigError, KeyboardInterrupt)) as caught:
            tag(store, "blue")
    assert store.read().serial_no == 43
    assert serials(store) == [42]
    if isinstance(caught.value, ConfigError):
        assert "serial 43 is written, but then: Input/output error" in str(caught.value)
        assert "as it was" not in str(caught.value.hint)


def test_an_old_version_that_can_not_be_forgotten_does_not_undo_the_new_one(
    store: ConfigStore,
) -> None:
    store.versions_dir.mkdir()
    for serial in range(1, KEPT_VERSIONS + 1):
        (store.versions_dir / str(serial)).mkdir()  # which no unlink removes
    with pytest.raises(ConfigError, match="serial 43 is written, but then: Is a directory"):
        tag(store, "blue")
    assert store.read().serial_no == 43
    assert store.read_version(42).serial_no == 42


def test_without_a_second_name_for_the_old_version_nothing_is_written(
    store: ConfigStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ConfigError, match="can't be written: Operation not permitted") as caught:
        tag(store, "blue")
    assert caught.value.hint == "the configuration is as it was"
    assert store.read().serial_no == 42
    assert store.versions() == []


def test_a_write_that_fails_leaves_an_older_file_as_it_was(
    aged: ConfigStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_by_hand(aged, aged.read_version(43).format())
    with monkeypatch.context() as patch:
        fill_disk(patch)
        with pytest.raises(ConfigError, match="No space left"):
            tag(aged, "blue")
    assert aged.read().serial_no == 43
    assert not list(aged.path.parent.glob("*older*"))


def test_versions_that_can_not_be_read_are_an_error(
    store: ConfigStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ConfigError, match=r"config\.versions: can't be read") as caught:
        store.versions()
    assert caught.value.hint == "be root, or a member of the group brine"
