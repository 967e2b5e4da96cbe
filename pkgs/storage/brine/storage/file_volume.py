"""The driver of volumes that are files in a folder.

A volume has a record in the folder ``.brine`` of its unit. The record is there before the first
file, and as long as any of them. A snapshot is a qcow2 overlay: it has what was written since the
snapshot, and the file below it stays as it was.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Self

from brine.common.errors import printable
from brine.common.files import read_regular, sync_folder, unfinished, write_whole
from brine.common.locks import node_lock
from brine.common.progress import Tell, tell_nothing
from brine.common.schema import SchemaError, parse
from brine.storage import directory_notes, qemu_img
from brine.storage.directory_notes import RECORDS, fault_of_mount
from brine.storage.file_directory import FileDirectory
from brine.storage.settings import is_within
from brine.storage.unit import StorageError, UnitStatus
from brine.storage.volume import (
    REMOVAL_BEGUN,
    Volume,
    VolumeFile,
    VolumeRequest,
    VolumeSnapshot,
    VolumeStatus,
    rounded,
)
from brine.vm.disk import Backing, Disk
from brine.vm.disk_files import DiskError, refuse_other_format
from brine.vm.runtime_file import lock_name

_MIB = 1 << 20
_QCOW2_MAGIC = b"QFI\xfb"
_LOCK_TIMEOUT_S = 60.0
_FICLONE = 0x40049409  # linux/fs.h
# Of another file system, of one that shares no blocks, and of a device.
_CAN_NOT_SHARE = {errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY}
_VERSION = 1
_USUAL_MODE = 0o600
_LEAST_ROOM = _MIB  # more than an empty overlay takes


class LayerState(StrEnum):
    MAKING = "making"
    """It may be there in part, and no disk has it."""
    MADE = "made"
    LEAVING = "leaving"
    """What is in it is in the layer below, too, and no disk has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A file of a volume: the first one, or the overlay of a snapshot.

    :param snapshot: empty is the first one.
    :param is_merging: a part of it may be in the layer below, too, and its snapshot is removed.
    """

    path: str
    format: str
    snapshot: str = ""
    since: float = 0.0
    state: str = LayerState.MADE.value
    is_merging: bool = False

    def as_snapshot(self) -> VolumeSnapshot:
        """The snapshot that the layer is laid over."""
        why = REMOVAL_BEGUN if self.is_merging else ""
        return VolumeSnapshot(name=self.snapshot, since=self.since, used=_used(self.path), why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The record of a volume.

    :param backing: what the first layer has below it, in no file of the volume.
    :param layers: the lowest first.
    """

    version: int
    uuid: str
    owner: str = ""
    name: str = ""
    backing: Backing | None = None
    layers: tuple[Layer, ...] = ()

    def made(self) -> list[Layer]:
        return [one for one in self.layers if one.state == LayerState.MADE]

    def with_state(self, state: LayerState, *layers: Layer) -> _Record:
        changed = {one: replace(one, state=state.value) for one in layers}
        return replace(self, layers=tuple(changed.get(one, one) for one in self.layers))

    def without(self, layer: Layer) -> _Record:
        return replace(self, layers=tuple(one for one in self.layers if one != layer))


class FileVolume(Volume):
    """A volume in a folder. See :class:`brine.storage.volume.Volume`."""

    driver: ClassVar[str] = "file"

    @classmethod
    def list(cls, unit: str) -> list[Self]:
        """The volumes with a record in a unit.

        :raises StorageError: if they can't be found out.
        """
        with cls._telling(unit):
            try:
                names = sorted(os.listdir(f"{unit}/{RECORDS}"))
            except FileNotFoundError:
                return []
        ids = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        return [cls(unit, one) for one in ids if not one.startswith(".")]

    def create(self, request: VolumeRequest, tell: Tell = tell_nothing) -> None:
        size = request.size if request.is_exact else rounded(request.size)
        path = f"{self.unit}/{self.uuid}.{request.format}"
        layer = self._new_layer(path, request.format)
        overlays = [self._new_overlay(one.name, one.since) for one in request.snapshots]
        with self._alone():
            if record := self._find():
                if record.made():
                    raise StorageError(f"{path}: is there already")
                self._drop(record)  # its making was interrupted
            needed = size + sum(one.used for one in request.snapshots)
            FileDirectory.find(self.unit).refuse_without_room(needed)
            directory_notes.note(self.unit)
            record = _Record(
                version=_VERSION,
                uuid=self.uuid,
                owner=request.owner,
                name=request.name,
                layers=(layer, *overlays),
            )
            self._begin_layers(record, layer, *overlays)
            try:
                with _new_image(path) as temporary:
                    if request.format == "raw":
                        os.truncate(temporary, size)
                    else:
                        qemu_img.run("create", "-q", "-f", request.format, temporary, str(size))
                for below, overlay in pairwise(record.layers):
                    self._make_overlay(overlay.path, below)
                self._write(record.with_state(LayerState.MADE, *record.layers))
            except BaseException:
                self._drop(record)
                raise

    def adopt(self, disk: Disk, *, owner: str) -> None:
        path = disk.path
        with self._alone():
            self._refuse_foreign(path)
            if (record := self._find()) and record.made():
                if record.made()[0].path != path:
                    raise StorageError(f"{path}: {record.made()[0].path} is the volume already")
                return
            for other in self.list(self.unit):
                if (there := other._find()) and path in [one.path for one in there.layers]:
                    raise StorageError(f"{path}: is the volume of the disk {other.uuid}")
            try:
                refuse_other_format(disk)
            except DiskError as error:
                raise StorageError(str(error), hint=error.hint) from error
            directory_notes.note(self.unit)
            layer = Layer(path=path, format=disk.format, since=round(os.stat(path).st_mtime, 3))
            self._write(
                _Record(
                    version=_VERSION,
                    uuid=self.uuid,
                    owner=owner,
                    name=disk.name,
                    backing=disk.backing,
                    layers=(layer,),
                )
            )

    def disk(self, disk: Disk) -> Disk:
        record = self._made()
        *below, top = record.made()
        backing = record.backing
        for layer in below:
            backing = Backing(path=layer.path, format=layer.format, backing=backing)
        return replace(
            disk,
            uuid=self.uuid,
            unit=self.unit,
            path=top.path,
            format=top.format,
            backing=backing,
            size_mib=-(-_size_of(top) // _MIB),
        )

    def status(self, *, with_use: bool = True) -> VolumeStatus:
        record = self._find()
        if record is None or not record.made():
            path = f"{self.unit}/{self.uuid}"
            text = fault_of_mount(self.unit) or "there is no such volume"
            return VolumeStatus(path=path, status=UnitStatus.MISSING, why=text)
        layers = record.made()
        top, paths = layers[-1], [one.path for one in layers]
        missing = [one for one in paths if not os.path.exists(one)]
        status, why = UnitStatus.OK, ""
        if missing:
            status, why = UnitStatus.MISSING, f"{missing[0]} is missing"
        snapshots = [one.as_snapshot() for one in layers[1:]]
        size = 0
        try:
            size = _size_of(top)
        except StorageError as error:
            if not why:
                status, why = UnitStatus.DEGRADED, str(error)
        return VolumeStatus(
            path=top.path,
            format=top.format,
            size=size,
            used=sum(map(_used, paths)),
            owner=record.owner,
            name=record.name,
            since=layers[0].since,
            is_open=with_use and any(map(_is_open, paths)),
            status=status,
            why=why,
            snapshots=tuple(snapshots),
        )

    def _refuse_unseen(self) -> None:
        is_seen = os.path.isdir(f"{self.unit}/{RECORDS}")
        if why := fault_of_mount(self.unit) or ("" if is_seen else "as if it was not mounted"):
            text = f"{self.unit}: {why}"
            raise StorageError(text, hint=f"mount it: findmnt --target {self.unit}")

    def files(self) -> Sequence[VolumeFile]:
        record = self._made()
        lowest, *overlays = record.made()
        if record.backing:
            text = f"{lowest.path}: is based on {record.backing.path}, which is not of its volume"
            raise StorageError(text)
        found = [VolumeFile(lowest.path, lowest.format)]
        found += [VolumeFile(one.path, one.format, one.as_snapshot()) for one in overlays]
        if bad := [one.snapshot for one in found if one.snapshot and one.snapshot.why]:
            hint = f"brine disk snapshot {record.owner} --remove {bad[0].name}"
            raise StorageError(f"{lowest.path}: {bad[0].fault()}", hint=hint)
        return found

    def settle_copy(self) -> None:
        with self._alone():
            for below, above in pairwise(self._made().made()):
                _name_below(above, below)

    def prepare(self) -> None:
        record = self._made()
        for layer in record.made():
            if not os.path.exists(layer.path):
                raise StorageError(f"{layer.path}: is missing")

    def grow(self, size: int) -> None:
        size = rounded(size)
        with self._alone():
            record = self._made()
            top = record.made()[-1]
            if (before := _size_of(top)) >= size:
                return
            FileDirectory.find(self.unit).refuse_without_room(size - before)
            with self._telling(top.path):
                if top.format == "raw":
                    os.truncate(top.path, size)
                elif not _is_open(top.path):
                    qemu_img.run("resize", "-q", self._chain(record, top), str(size))

    def copy_from(self, source: Disk, tell: Tell = tell_nothing) -> None:
        top = self._made().made()[-1]
        with self._telling(top.path):
            if not _share_blocks(source, top):
                # What was made just now has nothing but zeros.
                qemu_img.run_long(
                    *("convert", "-n", "--target-is-zero", "-O", top.format),
                    qemu_img.location_of(source),
                    top.path,
                    tell=tell,
                    text=f"copying {source.path} to {top.path}",
                )
            with open(top.path, "rb") as file:
                os.fsync(file.fileno())
        tell(1.0, f"copying {source.path} to {top.path}")

    def snapshot(self, name: str, *, space: int = 0) -> None:
        with self._alone():
            record = self._settled(self._made())
            top = record.made()[-1]
            if name in [one.snapshot for one in record.made()]:
                raise StorageError(f"{top.path}: has a snapshot {name} already")
            layer = self._new_overlay(name)
            record = replace(record, layers=(*record.layers, layer))
            self._begin_layers(record, layer)
            try:
                self._make_overlay(layer.path, top)
                self._write(record.with_state(LayerState.MADE, layer))
            except BaseException:
                self._settled(record)
                raise

    def rollback(self, name: str, *, size: int = 0) -> None:
        with self._alone():
            *below, top = self._made().made()
            if top.snapshot != name or not below:
                raise StorageError(f"{top.path}: {name} is not its newest snapshot")
            self._refuse_open(top.path)
            with contextlib.suppress(StorageError):  # what its header is does not matter any more
                size = max(size, _size_of(top))
            try:
                self._make_overlay(top.path, below[-1], size)  # a disk does not shrink
            except (StorageError, OSError):
                if FileDirectory.at(self.unit).free > _LEAST_ROOM:
                    raise
                self._remove_file(top.path)  # which takes as much at least
                self._make_overlay(top.path, below[-1], size)

    def discard(self, name: str) -> None:
        with self._alone():
            record = self._made()
            top = record.made()[-1]
            if top.snapshot == name:
                self._refuse_open(top.path)
                self._remove_file(top.path)  # first: a full unit has no space for another record
                self._write(record.without(top))

    def remove_snapshot(self, name: str, tell: Tell = tell_nothing) -> None:
        with self._alone():
            record = self._made()
            layer, below, _ = self._around(record, name)
            if layer is None or below is None:
                self._settled(record)
                return
            for one in (layer, below):
                self._refuse_open(one.path)
        self.merging(name)
        # Others may use the unit meanwhile; the layers are this instance's.
        text = f"merging the snapshot {name} into {below.path}"
        chain = self._chain(record, layer)
        qemu_img.run_long("commit", "-d", chain, tell=tell, text=text)
        with self._alone():
            record = self._made()
            layer, below, above = self._around(record, name)
            if layer is not None and below is not None:
                self._leave(record, layer, below, above)

    def merging(self, name: str) -> None:
        with self._alone():
            record = self._made()
            layer, _, _ = self._around(record, name)
            if layer and not layer.is_merging:
                changed = replace(layer, is_merging=True)
                layers = tuple(changed if one == layer else one for one in record.layers)
                self._write(replace(record, layers=layers))

    def merged(self, name: str) -> None:
        with self._alone():
            record = self._made()
            layer, below, above = self._around(record, name)
            if layer is not None and below is not None:
                self._leave(record, layer, below, above, is_open=True)
            else:
                self._settled(record)

    def remove(self, *, with_snapshots: bool = False) -> None:
        with self._alone():
            record = self._find()
            if record is None:  # nor has it a file; but a kill may have left half a record
                if not os.path.isdir(self.unit):  # what is not mounted now is not gone
                    raise StorageError(f"{self.unit}: there is no such folder")
                if why := fault_of_mount(self.unit):
                    raise StorageError(f"{self.unit}: {why}")
                if (left := unfinished(self._file())).exists():
                    left.unlink()
                return
            snapshots = [one.snapshot for one in record.made()[1:]]
            if snapshots and not with_snapshots:
                text = f"{record.made()[-1].path}: has the snapshot {snapshots[-1]}"
                raise StorageError(text, hint="remove its snapshots before")
            for layer in record.layers:
                self._refuse_open(layer.path)
            self._drop(record)

    # Its record.

    def _file(self) -> Path:
        return Path(self.unit, RECORDS, f"{self.uuid}.json")

    def _find(self) -> _Record | None:
        file = self._file()
        try:
            record = parse(_Record, json.loads(read_regular(file)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"{file}: can't be read: {error.strerror}") from error
        except (SchemaError, ValueError, RecursionError) as error:
            raise StorageError(f"{file}: is damaged: {error}") from error
        if record.version != _VERSION or record.uuid != self.uuid:
            raise StorageError(f"{file}: is of another version, or of another volume")
        return record

    def _made(self) -> _Record:
        record = self._find()
        if record is None or not record.made():
            why = fault_of_mount(self.unit) or f"has no volume of the disk {self.uuid}"
            raise StorageError(f"{self.unit}: {why}")
        return record

    def _write(self, record: _Record) -> None:
        file = self._file()
        with self._telling(str(file)):
            if not file.parent.is_dir():
                file.parent.mkdir(mode=0o700, exist_ok=True)
                sync_folder(file.parent.parent)
            data = json.dumps(asdict(record), indent=1).encode() + b"\n"
            write_whole(file, data, mode=0o600, alone=True)

    def _begin_layers(self, record: _Record, *layers: Layer) -> None:
        """Record layers before their files are there."""
        for layer in layers:
            if os.path.lexists(layer.path):
                raise StorageError(f"{layer.path}: is there, and is no volume of Brine's")
        self._write(record)

    def _settled(self, record: _Record) -> _Record:
        """The record without layers that a kill has left half-made or half-removed."""
        left = [one for one in record.layers if one.state != LayerState.MADE]
        for layer in left:
            self._remove_file(layer.path)
            record = record.without(layer)
        if left:
            self._write(record)
        return record

    def _drop(self, record: _Record) -> None:
        """Remove its files, then its record."""
        for layer in reversed(record.layers):
            self._remove_file(layer.path)
        file = self._file()
        with self._telling(str(file)):
            unfinished(file).unlink(missing_ok=True)
            file.unlink(missing_ok=True)
            sync_folder(file.parent)

    def _remove_file(self, path: str) -> None:
        with self._telling(path):
            for one in (_temporary(path), path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(one)
            sync_folder(Path(path).parent)

    # Its layers.

    def _new_overlay(self, snapshot: str, since: float = 0.0) -> Layer:
        path = f"{self.unit}/{self.uuid}.{snapshot}.qcow2"
        return self._new_layer(path, "qcow2", snapshot=snapshot, since=since)

    @staticmethod
    def _new_layer(path: str, image: str, *, snapshot: str = "", since: float = 0.0) -> Layer:
        return Layer(
            path=path,
            format=image,
            snapshot=snapshot,
            since=since or round(time.time(), 3),
            state=LayerState.MAKING.value,
        )

    def _make_overlay(self, path: str, below: Layer, size: int = 0) -> None:
        with _new_image(path) as temporary:
            options = ["-q", "-f", "qcow2", "-F", below.format, "-b", below.path, "-u"]
            qemu_img.run("create", *options, temporary, str(max(size, _size_of(below))))

    def _around(
        self, record: _Record, name: str
    ) -> tuple[Layer | None, Layer | None, Layer | None]:
        """The layer of a snapshot, the one below it, and the one above it."""
        layers = record.made()
        for index, layer in enumerate(layers[1:], 1):
            if layer.snapshot == name:
                above = layers[index + 1] if index + 1 < len(layers) else None
                return layer, layers[index - 1], above
        return None, None, None

    def _chain(self, record: _Record, top: Layer) -> str:
        """How qemu-img opens a layer and what is below it."""
        layers = record.made()
        backing = record.backing
        for layer in layers[: layers.index(top)]:
            backing = Backing(path=layer.path, format=layer.format, backing=backing)
        return qemu_img.location_of(Disk(path=top.path, format=top.format, backing=backing))

    def _leave(
        self,
        record: _Record,
        layer: Layer,
        below: Layer,
        above: Layer | None,
        *,
        is_open: bool = False,
    ) -> None:
        """Remove a layer whose data the one below it has. The header of the one above is for people
        and their tools: Brine's disks name what is below them."""
        record = record.with_state(LayerState.LEAVING, layer)
        self._write(record)
        if above and not is_open:
            _name_below(above, below)
        self._settled(record)

    # What is refused.

    def _refuse_foreign(self, path: str) -> None:
        unit = FileDirectory.find(self.unit)
        if unit.status is UnitStatus.MISSING:
            raise StorageError(f"{unit.name}: {unit.why}")
        folder = os.path.dirname(path)
        is_here = is_within(folder, self.unit) and not is_within(folder, f"{self.unit}/{RECORDS}")
        if not is_here or os.path.realpath(path) != path:
            raise StorageError(f"{path}: is no file of the unit {self.unit}")
        if not Path(path).is_file():
            raise StorageError(f"{path}: is no file")

    def _refuse_open(self, path: str) -> None:
        if _is_open(path):
            raise StorageError(f"{path}: is in use", hint="stop what uses it before")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        name = lock_name("storage-unit", Path(self.unit))
        with node_lock(name, timeout_s=_LOCK_TIMEOUT_S), self._telling(self.unit):
            yield

    @staticmethod
    @contextlib.contextmanager
    def _telling(path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{printable(path)}: {error.strerror or error}") from error


def _temporary(path: str) -> str:
    return f"{os.path.dirname(path)}/.{os.path.basename(path)}.new"


@contextlib.contextmanager
def _new_image(path: str) -> Iterator[str]:
    """Make an image under another name, which becomes *path* at the end of the block. What was at
    that name before goes."""
    temporary = _temporary(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _USUAL_MODE)
    try:
        yield temporary
        os.fsync(descriptor)
        os.rename(temporary, path)
        sync_folder(Path(path).parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)


def _name_below(layer: Layer, below: Layer) -> None:
    """Have the header of a layer name the one below it: for people and their tools."""
    qemu_img.refuse_external_data(layer.path)
    options = ["-q", "-u", "-f", "qcow2", "-F", below.format, "-b", below.path]
    qemu_img.run("rebase", *options, layer.path)


def _size_of(layer: Layer) -> int:
    """The size that a guest sees, in bytes. Source: QEMU's docs/interop/qcow2.rst."""
    try:
        with open(layer.path, "rb") as file:
            if layer.format == "raw":
                return os.fstat(file.fileno()).st_size
            header = file.read(32)
    except OSError as error:
        raise StorageError(f"{layer.path}: can't be read: {error.strerror}") from error
    if len(header) < 32 or not header.startswith(_QCOW2_MAGIC):
        raise StorageError(f"{layer.path}: is no qcow2 image")
    return int.from_bytes(header[24:32], "big")


def _share_blocks(source: Disk, target: Layer) -> bool:
    """Have a new file share the blocks of a disk's file, if their file system can; it keeps its
    size. Source: :manpage:`ioctl_ficlone(2)`."""
    if source.backing or source.format != target.format:
        return False
    if source.format == "qcow2":
        qemu_img.refuse_external_data(source.path)
    size = _size_of(target)
    try:
        with open(source.path, "rb") as original, open(target.path, "r+b") as copy:
            fcntl.ioctl(copy, _FICLONE, original.fileno())
    except OSError as error:
        if error.errno in _CAN_NOT_SHARE:
            return False
        raise
    if _size_of(target) < size:
        if target.format == "raw":
            os.truncate(target.path, size)
        else:
            qemu_img.run("resize", "-q", "-f", target.format, target.path, str(size))
    return True


def _used(path: str) -> int:
    try:
        return os.stat(path).st_blocks * 512
    except OSError:
        return 0


def _is_open(path: str) -> bool:
    """Whether any process, or the kernel, has a file open: then the kernel grants no lease for
    writing. Source: :manpage:`fcntl(2)`, F_SETLEASE."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        # A process that opens it now must not end this one by SIGIO.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return True
        return _is_in_proc(descriptor)  # a file system without leases, such as NFS
    finally:
        os.close(descriptor)
    return False


def _is_in_proc(descriptor: int) -> bool:
    """Whether another process of this node has a file open."""
    wanted = os.fstat(descriptor)
    for process in os.listdir("/proc"):
        if not process.isdecimal() or int(process) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.stat(f"/proc/{process}/fd/{name}"), wanted):
                        return True
    return False
