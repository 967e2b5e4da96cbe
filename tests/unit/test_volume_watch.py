"""Which changes of volumes the watcher tells."""

from __future__ import annotations

from brine.instance.disks.states import DiskState
from brine.storage.unit import UnitStatus
from brine.storage.volume import VolumeSnapshot, VolumeStatus
from brine.vm.disk import Disk
from brine.watcher.volume_watch import Faults, VolumeFault, Watched, changes

UUID = "5d0c1c9e-2a0b-4c39-8f0e-3b1f4d7a9c01"
DISK = Disk(path=f"/dev/vg1/brine-{UUID}", unit="vg1", uuid=UUID)
ONE = Watched("vg1", UUID, "one")
OWN = Watched("vg1", UUID)
LOST = VolumeSnapshot(name="one", size=100, used=100, why="it is lost")


def at(status: UnitStatus, why: str = "", *snapshots: VolumeSnapshot) -> DiskState:
    made = VolumeStatus(path=DISK.path, status=status, why=why, snapshots=snapshots)
    return DiskState(DISK, "plain", made)


def told(before: Faults, *states: DiskState) -> tuple[list[tuple[str, str]], Faults]:
    found, after = changes(before, {"web1": states} if states else {})
    return [(one.watched.snapshot, str(one.fault or "ok")) for one in found], after


def used(part: int) -> DiskState:
    return at(UnitStatus.OK, "", VolumeSnapshot(name="one", size=100, used=part))


def test_a_snapshot_is_told_from_four_fifths_of_its_space_on() -> None:
    assert told({}, used(79)) == ([], {})
    filling = {ONE: VolumeFault.FILLING}
    assert told({}, used(80)) == ([("one", "filling")], filling)
    assert told(filling, used(99)) == ([], filling)
    assert told(filling, used(79)) == ([("one", "ok")], {})
    # A file has as much space as its folder, and is not lost while its snapshot is removed.
    for why in ("", "its removal was begun"):
        unlimited = at(UnitStatus.OK, "", VolumeSnapshot(name="one", used=100, why=why))
        assert told({}, unlimited) == ([], {})


def test_a_volume_with_a_lost_snapshot_is_told_as_that() -> None:
    lost = at(UnitStatus.DEGRADED, LOST.fault(), LOST)
    assert told({}, lost) == ([("one", "lost")], {ONE: VolumeFault.LOST})
    both = at(UnitStatus.DEGRADED, "partial", LOST)
    faults = {OWN: VolumeFault.DEGRADED, ONE: VolumeFault.LOST}
    assert told({}, both) == ([("", "degraded"), ("one", "lost")], faults)
    # When the snapshot is gone, nothing is told of it.
    assert told(faults, at(UnitStatus.OK)) == ([("", "ok")], {})


def test_what_is_not_seen_now_has_the_faults_that_it_had() -> None:
    faults = {OWN: VolumeFault.DEGRADED, ONE: VolumeFault.LOST}
    assert told(faults, at(UnitStatus.UNKNOWN, "no answer")) == ([], faults)
    missing = {OWN: VolumeFault.MISSING, ONE: VolumeFault.LOST}
    assert told(faults, at(UnitStatus.MISSING, "gone")) == ([("", "missing")], missing)
    assert told(faults) == ([], {})
    assert changes(faults, {}, are_all=False) == ([], faults)
    assert changes(faults, {"web1": [at(UnitStatus.OK)]}, are_all=False)[1] == {}
