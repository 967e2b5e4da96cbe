"""The driver of volumes that are logical volumes of LVM, linear or striped: *plain*.

Tags mark a volume: ``brine``, and the UUID of its disk. A snapshot is a thick snapshot of LVM's: a
copy of each block that is written since, in a space that may become full; then it is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Self

from brine.common.locks import node_lock
from brine.common.progress import Tell, tell_nothing
from brine.storage import lvm, qemu_img
from brine.storage.lvm_units import LvmVg
from brine.storage.unit import StorageError, UnitStatus
from brine.storage.volume import (
    REMOVAL_BEGUN,
    UnusableVolumeError,
    Volume,
    VolumeFile,
    VolumeRequest,
    VolumeSnapshot,
    VolumeStatus,
    Wipe,
    rounded,
)
from brine.vm.disk import Disk

_MIB = 1 << 20
_BLKZEROOUT = 0x127F  # linux/fs.h
_PIECE = 64 * _MIB
_WRITTEN = 4 * _MIB
_END = _MIB
_LOCK_TIMEOUT_S = 60.0
_MERGE_S = 24 * 3600.0
_LOOK_S = 1.0
_SNAPSHOT_PART = 5  # a snapshot may take the fifth part of its volume
_LEAST_SNAPSHOT = 64 * _MIB

_PARTIAL = "partial: a physical volume under it is missing"
_OURS = "brine"
_OWNER = "brine.owner="
_NAME = "brine.name="
_SNAPSHOT = "brine.snapshot="
_ORDER = "brine.order="
_MAKING = "brine.making"
_LEAVING = "brine.leaving"
_GROWING = "brine.growing="
_GOING_BACK = "brine.rollback="


class PlainVolume(Volume):
    """A logical volume. See :class:`brine.storage.volume.Volume`."""

    driver: ClassVar[str] = "plain"

    @classmethod
    def list(cls) -> list[Self]:
        """The marked volumes of all volume groups."""
        return [
            cls(row["vg_name"], disk)
            for row in lvm.volumes()
            if (disk := lvm.tag_of(row, lvm.DISK_TAG)) and not lvm.tag_of(row, _SNAPSHOT)
        ]

    def create(self, request: VolumeRequest, tell: Tell = tell_nothing) -> None:
        if request.format != "raw" or request.snapshots:
            what = "snapshots of images" if request.snapshots else request.format
            raise StorageError(f"{self.unit}: a volume group has raw volumes only, not {what}")
        with self._alone():
            try:
                self._make(request)
            except lvm.LvmHangsError:
                raise
            except lvm.LvmError:  # LVM looks for all that stands in the way, and says less of it
                self._clear_the_way(rounded(request.size))
                self._make(request)
        # Others may use the unit meanwhile.
        full, path = f"{self.unit}/{self._lv_name()}", f"/dev/{self.unit}/{self._lv_name()}"
        try:
            _wipe(path, 0, None, request.wipe, tell)
            lvm.change("lvchange", "--deltag", _MAKING, full)
        except BaseException:
            lvm.change("lvremove", "--yes", full)
            raise

    def _make(self, request: VolumeRequest) -> None:
        tags = {_OURS, _MAKING, f"{lvm.DISK_TAG}{self.uuid}"}
        tags |= {f"{_OWNER}{request.owner}"} if request.owner else set()
        tags |= {f"{_NAME}{request.name}"} if request.name else set()
        how = ["--stripes", str(request.stripes)] if request.stripes > 1 else []
        if request.stripes > 1 and request.stripe_size:
            how += ["--stripesize", f"{request.stripe_size}b"]
        lvm.change(
            "lvcreate",
            *("--yes", "--wipesignatures", "y", "--zero", "y"),
            *("--name", self._lv_name(), "--size", f"{rounded(request.size)}b", *how),
            *(word for tag in sorted(tags) for word in ("--addtag", tag)),
            self.unit,
        )

    def _clear_the_way(self, size: int) -> None:
        """Remove a volume whose making was interrupted, and refuse all else that keeps a new one
        from being made."""
        if row := self._row():
            if _MAKING not in _tags(row):
                raise StorageError(f"{row['lv_path']}: is there already")
            lvm.change("lvremove", "--yes", self._full(row))
        self._refuse_same_name()
        LvmVg.find(self.unit).refuse_without_room(size)

    def adopt(self, disk: Disk, *, owner: str) -> None:
        with self._alone():
            row = self._at(disk.path)
            if other := lvm.tag_of(row, lvm.DISK_TAG):
                if other != self.uuid:
                    raise StorageError(f"{disk.path}: is the volume of the disk {other}")
                return
            if there := self._row():
                raise StorageError(f"{disk.path}: {there['lv_path']} is the volume already")
            layout, roles = row["lv_layout"].split(","), row["lv_role"].split(",")
            if "thin" in layout:
                text = f"{disk.path}: is in a thin pool, and Brine uses none"
                hint = "a full thin pool loses what guests have written: lvconvert, or copy it"
                raise StorageError(text, hint=hint)
            if "snapshot" in roles or not set(layout) <= {"linear", "striped", "raid", "raid1"}:
                raise StorageError(f"{disk.path}: is a {row['lv_layout']} volume of LVM's")
            tags = [_OURS, f"{lvm.DISK_TAG}{self.uuid}", f"{_OWNER}{owner}"]
            tags += [f"{_NAME}{disk.name}"] if disk.name else []
            self._change_tags(row, *(word for tag in tags for word in ("--addtag", tag)))

    def disk(self, disk: Disk) -> Disk:
        row = self._there()
        mib = -(-int(row["lv_size"]) // _MIB)
        return replace(disk, uuid=self.uuid, unit=self.unit, path=row["lv_path"], size_mib=mib)

    def status(self, *, with_use: bool = True) -> VolumeStatus:
        del with_use  # LVM has said it already
        row, why = None, f"there is no volume group {self.unit}"
        if self._has_group():
            row, why = self._row(), "there is no such volume"
        if row is None:
            path = f"/dev/{self.unit}/{self._lv_name()}"
            return VolumeStatus(path=path, status=UnitStatus.MISSING, why=why)
        snapshots = self._snapshots()
        status, why = UnitStatus.OK, ""
        if _MAKING in _tags(row):
            status, why = UnitStatus.MISSING, "its making was interrupted"
        elif health := row["lv_health_status"]:
            why = _PARTIAL if health == "partial" else f"LVM says {health}"
            status = UnitStatus.DEGRADED
        elif not _is_active(row):
            why = "it is not active"
        elif lost := list(filter(_is_lost, snapshots)):
            status, why = UnitStatus.DEGRADED, _snapshot_of(lost[0]).fault()
        return VolumeStatus(
            path=row["lv_path"],
            size=int(row["lv_size"]),
            used=sum(int(one["lv_size"]) for one in (row, *snapshots)),
            owner=lvm.tag_of(row, _OWNER),
            name=lvm.tag_of(row, _NAME),
            since=float(row["lv_time"] or 0),
            is_open=row["lv_device_open"] == "1",
            status=status,
            why=why,
            snapshots=tuple(map(_snapshot_of, snapshots)),
        )

    def files(self) -> Sequence[VolumeFile]:
        row = self._there()
        if there := list(self._of_origin(row)):
            names = ", ".join(lvm.tag_of(one, _SNAPSHOT) or one["lv_name"] for one in there)
            text = f"{row['lv_path']}: has snapshots that LVM keeps: {names}"
            raise StorageError(text, hint="remove them before")
        return [VolumeFile(row["lv_path"])]

    def settle_copy(self) -> None:
        """Nothing: a device names no other."""

    def prepare(self) -> None:
        row = self._there()
        # An active one can be opened still, and its guest would meet errors in the middle of its
        # work. A mirror has the other half.
        if row["lv_health_status"] == "partial" and "raid" not in row["lv_layout"].split(","):
            raise UnusableVolumeError(f"{row['lv_path']}: {_PARTIAL}")
        if not _is_active(row):
            lvm.change("lvchange", "--activate", "y", self._full(row))
        if lvm.tag_of(row, _GROWING):
            try:
                self._end_growth()
            except StorageError as error:
                text = f"{row['lv_path']}: what it has grown by is not wiped: {error}"
                raise UnusableVolumeError(text, hint=error.hint) from error

    def grow(self, size: int) -> None:
        size = rounded(size)
        with self._alone():
            row = self._there()
            if int(row["lv_size"]) >= size and not lvm.tag_of(row, _GROWING):
                return
        self.prepare()
        with self._alone():
            row = self._there()
            if int(row["lv_size"]) >= size:
                return
            if snapshots := list(self._of_origin(row)):
                name = lvm.tag_of(snapshots[-1], _SNAPSHOT) or snapshots[-1]["lv_name"]
                text = f"{row['lv_path']}: has the snapshot {name}"
                hint = "LVM grows no volume with snapshots: remove them before"
                raise StorageError(text, hint=hint)
            LvmVg.find(self.unit).refuse_without_room(size - int(row["lv_size"]))
            # What a former owner has left in the new space is no guest's.
            self._change_tags(row, "--addtag", f"{_GROWING}{row['lv_size']}")
            lvm.change("lvextend", "--size", f"{size}b", self._full(row))
        self._end_growth()

    def _end_growth(self) -> None:
        """Have what it has grown by be empty."""
        with self._alone():
            row = self._there()
        if growing := lvm.tag_of(row, _GROWING):
            now = int(row["lv_size"])
            _wipe(row["lv_path"], int(growing), now - int(growing), Wipe.ZERO, tell_nothing)
            self._untag(row, f"{_GROWING}{growing}")

    def copy_from(self, source: Disk, tell: Tell = tell_nothing) -> None:
        row = self._there()
        qemu_img.run_long(
            *("convert", "-n", "-O", "raw", qemu_img.location_of(source)),
            row["lv_path"],
            tell=tell,
            text=f"copying {source.path} to {row['lv_path']}",
        )
        with open(row["lv_path"], "rb+") as device:
            os.fsync(device.fileno())

    def snapshot(self, name: str, *, space: int = 0) -> None:
        self.prepare()
        with self._alone():
            row = self._there()
            if name in self._snapshot_names():
                raise StorageError(f"{row['lv_path']}: has a snapshot {name} already")
            self._make_snapshot(row, name, rounded(space) or _usual_space(row))

    def rollback(self, name: str, *, size: int = 0) -> None:
        del size  # LVM grows none with snapshots
        self.prepare()  # LVM puts nothing back while it is not active
        with self._alone():
            row = self._there()
            snapshots = self._snapshots()
            going_back = f"{_GOING_BACK}{name}#"
            if not lvm.tag_of(row, going_back):
                if not snapshots or lvm.tag_of(snapshots[-1], _SNAPSHOT) != name:
                    raise StorageError(f"{row['lv_path']}: {name} is not its newest snapshot")
                if row["lv_device_open"] == "1":
                    raise StorageError(f"{row['lv_path']}: is in use", hint="stop what uses it")
                if why := _snapshot_of(snapshots[-1]).why:
                    raise StorageError(f"{row['lv_path']}: snapshot {name}: {why}")
                self._change_tags(row, "--addtag", f"{going_back}{snapshots[-1]['lv_size']}")
                row = self._there()
            space = int(lvm.tag_of(row, going_back))
            for one in snapshots:
                if lvm.tag_of(one, _SNAPSHOT) == name and one["lv_merging"] != "1":
                    lvm.change("lvconvert", "--yes", "--merge", "--background", self._full(one))
            self._await_merge(name)
            self._make_snapshot(row, name, space)
            self._untag(row, f"{going_back}{space}")

    def remove_snapshot(self, name: str, tell: Tell = tell_nothing) -> None:
        with self._alone():
            for row in self._snapshots():
                if lvm.tag_of(row, _SNAPSHOT) == name:
                    lvm.change("lvremove", "--yes", self._full(row))

    def discard(self, name: str) -> None:
        self.remove_snapshot(name)

    def merging(self, name: str) -> None:
        with self._alone():
            for row in self._snapshots():
                if lvm.tag_of(row, _SNAPSHOT) == name and _LEAVING not in _tags(row):
                    self._change_tags(row, "--addtag", _LEAVING)

    def merged(self, name: str) -> None:
        """Nothing: the snapshots of LVM are no layers of an image."""

    def remove(self, *, with_snapshots: bool = False) -> None:
        with self._alone():
            if self._remove_bare():
                return
            row = self._row()
            if row is None:
                self._refuse_same_name()
                return
            snapshots = self._snapshots()
            if snapshots and not with_snapshots:
                text = f"{row['lv_path']}: has the snapshot {lvm.tag_of(snapshots[-1], _SNAPSHOT)}"
                raise StorageError(text, hint="remove its snapshots before")
            ours = [one["lv_name"] for one in snapshots]
            others = [one["lv_name"] for one in self._of_origin(row)]
            if theirs := [one for one in others if one not in ours]:
                text = f"{row['lv_path']}: has the snapshot {theirs[0]}, which Brine has not made"
                raise StorageError(text, hint="remove that before")
            if row["lv_device_open"] == "1":
                raise StorageError(f"{row['lv_path']}: is in use", hint="stop what uses it before")
            for each in (*reversed(snapshots), row):
                lvm.change("lvremove", "--yes", self._full(each))

    def _remove_bare(self) -> bool:
        """Remove the volume if LVM has it without snapshots; returns whether it was so. LVM looks
        and removes in one command; of all that stands in the way it says less."""
        ours = f'lv_name="{self._lv_name()}" && lv_tags={{"{lvm.DISK_TAG}{self.uuid}"}}'
        bare = f'{ours} && lv_attr=~"^-"'  # lvs(8)
        try:
            return "successfully removed" in lvm.change(
                "lvremove", "--yes", "--select", bare, self.unit
            )
        except lvm.LvmHangsError:
            raise
        except lvm.LvmError:
            return False

    # What LVM has.

    def _lv_name(self) -> str:
        return f"brine-{self.uuid}"

    def _has_group(self) -> bool:
        # LVM is asked for groups only if none of the volumes is in this one.
        return any(one["vg_name"] == self.unit for one in lvm.volumes()) or any(
            one["vg_name"] == self.unit for one in lvm.report().groups
        )

    def _rows(self) -> Sequence[lvm.Row]:
        found = [
            row
            for row in lvm.volumes()
            if row["vg_name"] == self.unit and lvm.tag_of(row, lvm.DISK_TAG) == self.uuid
        ]
        if not found:
            self._refuse_unseen()
        return found

    def _refuse_unseen(self) -> None:
        LvmVg.find(self.unit)

    def _row(self) -> lvm.Row | None:
        return next((row for row in self._rows() if not lvm.tag_of(row, _SNAPSHOT)), None)

    def _there(self) -> lvm.Row:
        if (row := self._row()) is None:
            raise StorageError(f"{self.unit}: has no volume of the disk {self.uuid}")
        return row

    def _snapshots(self) -> Sequence[lvm.Row]:
        """The oldest first."""
        rows = [row for row in self._rows() if lvm.tag_of(row, _SNAPSHOT)]
        return sorted(rows, key=_order_of)

    def _snapshot_names(self) -> Sequence[str]:
        return [lvm.tag_of(one, _SNAPSHOT) for one in self._snapshots()]

    def _of_origin(self, row: lvm.Row) -> Iterator[lvm.Row]:
        """All snapshots of a volume, whoever has made them."""
        for one in lvm.volumes():
            if (one["vg_name"], one["origin"]) == (self.unit, row["lv_name"]):
                yield one

    def _at(self, path: str) -> lvm.Row:
        """The logical volume of a path, which may be any of its names."""
        wanted = os.path.realpath(path)
        for row in lvm.volumes():
            names = (row["lv_path"], f"/dev/{row['vg_name']}/{row['lv_name']}")
            if row["vg_name"] == self.unit and (
                path in names or wanted in map(os.path.realpath, filter(None, names))
            ):
                return row
        raise StorageError(f"{path}: is no logical volume of {self.unit}")

    @staticmethod
    def _full(row: lvm.Row) -> str:
        return f"{row['vg_name']}/{row['lv_name']}"

    def _change_tags(self, row: lvm.Row, *changes: str) -> None:
        lvm.change("lvchange", *changes, self._full(row))

    def _untag(self, row: lvm.Row, tag: str) -> None:
        self._change_tags(row, "--deltag", tag)

    def _make_snapshot(self, row: lvm.Row, name: str, space: int) -> None:
        LvmVg.find(self.unit).refuse_without_room(space)
        order = 1 + max((_order_of(one)[0] for one in self._snapshots()), default=0)
        tags = [_OURS, f"{lvm.DISK_TAG}{self.uuid}", f"{_SNAPSHOT}{name}", f"{_ORDER}{order}"]
        lvm.change(
            "lvcreate",
            *("--yes", "--snapshot", "--name", f"{self._lv_name()}.{name}"),
            *("--size", f"{space}b"),
            *(word for tag in tags for word in ("--addtag", tag)),
            self._full(row),
        )

    def _is_merging(self) -> bool:
        """Whether LVM puts a snapshot back, which it does not list meanwhile."""
        return self._there()["lv_attr"].startswith("O")  # lvs(8)

    def _await_merge(self, name: str) -> None:
        """Wait until LVM has put a snapshot back into its volume."""
        deadline = time.monotonic() + _MERGE_S
        while self._is_merging() or name in [
            lvm.tag_of(one, _SNAPSHOT) for one in self._snapshots()
        ]:
            if time.monotonic() > deadline:
                raise StorageError(f"{self.unit}: the snapshot {name} is not put back yet")
            lvm.change("lvchange", "--poll", "y", self._full(self._there()))
            time.sleep(_LOOK_S)

    # What is refused.

    def _refuse_same_name(self) -> None:
        for row in lvm.volumes():
            if (row["vg_name"], row["lv_name"]) == (self.unit, self._lv_name()):
                text = f"{row['lv_path']}: is there, and has no mark of Brine's"
                raise StorageError(text)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with node_lock(f"storage-unit-{self.unit}", timeout_s=_LOCK_TIMEOUT_S):
            # Another command may have changed something since.
            lvm.forget()
            yield


def _tags(row: lvm.Row) -> list[str]:
    return row["lv_tags"].split(",")


def _is_active(row: lvm.Row) -> bool:
    return row["lv_active"] in ("1", "active")  # in words also where all else is 0 or 1


def _usual_space(row: lvm.Row) -> int:
    size = int(row["lv_size"])
    whole = size + size // 64 + _MIB  # all of it, and where LVM notes what is there
    return rounded(min(max(size // _SNAPSHOT_PART, _LEAST_SNAPSHOT), whole))


def _order_of(row: lvm.Row) -> tuple[int, float, str]:
    """The place of a snapshot among those of its volume; the clock may have been put back."""
    order = lvm.tag_of(row, _ORDER)
    return int(order) if order.isdecimal() else 0, float(row["lv_time"] or 0), row["lv_name"]


def _is_lost(row: lvm.Row) -> bool:
    return row["lv_snapshot_invalid"] == "1" or float(row["snap_percent"] or 0) >= 100


def _snapshot_of(row: lvm.Row) -> VolumeSnapshot:
    size = int(row["lv_size"])
    percent = float(row["snap_percent"] or 0)
    why = REMOVAL_BEGUN if _LEAVING in _tags(row) else ""
    return VolumeSnapshot(
        name=lvm.tag_of(row, _SNAPSHOT),
        since=float(row["lv_time"] or 0),
        used=int(size * percent / 100),
        size=size,
        why="its space is full, and it is lost" if _is_lost(row) else why,
        path=row["lv_path"],
    )


def _wipe(path: str, start: int, size: int | None, how: Wipe, tell: Tell) -> None:
    """Have a part of a device read as zeros, or its ends; without a size, all from *start* on."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_EXCL)
        try:
            end = os.lseek(descriptor, 0, os.SEEK_END) if size is None else start + size
            if how is Wipe.ENDS:
                for at in {start, max(start, end - _END)}:
                    _zero(descriptor, at, min(_END, end - at))
            else:
                _wipe_all(descriptor, path, start, end, how, tell)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"{path}: can't be wiped: {error.strerror}") from error


def _wipe_all(descriptor: int, path: str, start: int, end: int, how: Wipe, tell: Tell) -> None:
    with mmap.mmap(-1, _WRITTEN) as zeros:
        at = start
        while at < end:
            piece = min(_WRITTEN if how is Wipe.FULL else _PIECE, end - at)
            if how is Wipe.FULL:
                with memoryview(zeros) as whole, whole[:piece] as part:
                    piece = os.pwrite(descriptor, part, at)
            else:
                _zero(descriptor, at, piece)
            at += piece
            tell((at - start) / (end - start), f"wiping {path}")


def _zero(descriptor: int, start: int, size: int) -> None:
    fcntl.ioctl(descriptor, _BLKZEROOUT, struct.pack("QQ", start, size))
