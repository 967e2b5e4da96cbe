"""Files and devices of disks, copied byte by byte to the other node while no guest uses them.

QEMU's own tools do it, over NBD with the key of the move: the target's process serves one file at a
time, and the source's writes it. So images of any format are copied whole, and holes stay holes.
Both compare checksums before the source gives anything away.
"""

from __future__ import annotations

import hashlib
import os
import re
import selectors
import stat
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from brine.common.errors import printable
from brine.common.process import ENDING_WITH_US
from brine.moves import channel
from brine.moves.migration import CopyPhase, MoveError, MoveProgress, TellProgress, tell_no_progress
from brine.moves.move_key import KeyFolder
from brine.storage import lvm
from brine.storage.volume import Volume, VolumeFile

_EXPORT = "file"
_CHUNK = 4 << 20
_ENDS_S = 20.0
_LOOK_S = 0.5
_LOOKS = 10
_OPEN_S = 0.2
_PROGRESS = re.compile(rb"\(([0-9.]+)/100%\)")
_LISTENING = 'exec env LISTEN_PID=$$ LISTEN_FDS=1 "$@" 3<&{number}'
"""qemu-nbd takes a listener as systemd passes it (sd_listen_fds(3))."""


def files_by_role(volume: Volume) -> Mapping[str, VolumeFile]:
    """The files of a volume by their role, the same on both nodes: ``0`` has what is written now,
    then those below it.

    :raises brine.storage.unit.StorageError: if they are not all of the volume.
    """
    return {str(role): file for role, file in enumerate(reversed(volume.files()))}


def remove_volume(volume: Volume) -> None:
    """Remove a volume, or what there is of it. Its QEMU may have ended just now, and udev look at
    it for a moment. Instances that have it are not asked for: it is a spec's that goes, too.

    :raises BrineError: why it stays.
    """
    for _ in range(_LOOKS):
        lvm.forget()
        if not volume.status().is_open:
            break
        time.sleep(_OPEN_S)
    volume.remove(with_snapshots=True)


class FileServer:
    """The target's side: one file or device after another, for those who have the key.

    :param address: of this node.
    :param key: has the file of the key.
    """

    def __init__(self, address: str, key: KeyFolder) -> None:
        self._address = address
        self._key = key
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the source can write something now."""
        return self._process is not None and self._process.poll() is None

    def serve(self, path: str, size: int) -> tuple[int, bool]:
        """Have the source write a file or device; what was served before is not any more.

        :param size: in bytes. A file is emptied, and gets that size.
        :returns: the port, and whether it is known to have zeros only.
        """
        self.close()
        is_zero = _emptied(path, size)
        with channel.listen(self._address) as listener:
            number = listener.fileno()
            command = [
                *("qemu-nbd", "--format=raw", f"--export-name={_EXPORT}", "--shared=0"),
                *("--persistent", "--discard=unmap", "--cache=writeback"),
                *(f"--object={_credentials(self._key, 'server')}", "--tls-creds=tls", path),
            ]
            self._process = subprocess.Popen(
                [*ENDING_WITH_US, "bash", "-c", _LISTENING.format(number=number), "bash", *command],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            return int(listener.getsockname()[1]), is_zero

    def close(self) -> None:
        """End what is served. Nothing writes it any more when this returns."""
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(_ENDS_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None


def _emptied(path: str, size: int) -> bool:
    """Have a file have that many zeros; a device stays as it is.

    :returns: whether it has zeros only.
    :raises MoveError: if a device is smaller.
    """
    try:
        with open(path, "r+b") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.truncate(0)
                file.truncate(size)
                return True
            if (found := file.seek(0, os.SEEK_END)) < size:
                raise MoveError(f"{path}: has {found} bytes, and {size} are needed")
            return False
    except OSError as error:
        raise MoveError(f"{path}: {error.strerror}") from error


def send_file(
    path: str,
    address: str,
    port: int,
    key: KeyFolder,
    *,
    is_zero: bool,
    tell: TellProgress = tell_no_progress,
) -> None:
    """The source's side: write a file or device to where the target serves one.

    :param is_zero: the target has zeros only, so holes need not be sent.
    :param tell: is called several times a second; its error ends the copying.
    :raises MoveError: why it was not copied.
    """
    target = f"driver=nbd,server.type=inet,server.host={address},server.port={port}"
    command = [
        *("qemu-img", "convert", "-n", "-p", "-W", "-f", "raw", "-S", "4k"),
        *(["--target-is-zero"] if is_zero else []),
        *("--object", _credentials(key, "client"), "--target-image-opts", path),
        f"{target},export={_EXPORT},tls-creds=tls",
    ]
    with subprocess.Popen(
        [*ENDING_WITH_US, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            said = _follow(process, size_in(path), tell)
        except BaseException:
            process.kill()
            raise
        if process.wait():
            raise MoveError(f"{path}: was not copied: {said or process.returncode}")


def _follow(process: subprocess.Popen[bytes], size: int, tell: TellProgress) -> str:
    """Tell the progress of a copy until its process ends; returns what that said of faults."""
    began, share, faults = time.monotonic(), 0.0, b""
    assert process.stdout
    assert process.stderr
    with selectors.DefaultSelector() as selector:
        for pipe in (process.stdout, process.stderr):
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(_LOOK_S):
                pipe_of: IO[bytes] = key.fileobj  # type: ignore[assignment]
                data = os.read(pipe_of.fileno(), 64 * 1024)
                if not data:
                    selector.unregister(pipe_of)
                elif pipe_of is process.stderr:
                    faults = (faults + data)[-2000:]
                elif found := _PROGRESS.findall(data):
                    share = float(found[-1]) / 100
            spent_s = time.monotonic() - began
            rate = share * size / spent_s if spent_s > 0 else 0.0
            rest_s = (1 - share) * size / rate if rate else None
            tell(MoveProgress(CopyPhase.DISKS, int(share * size), size, rate, rest_s))
    return printable(faults.decode(errors="replace").strip().replace("\n", "; "))


def end_copy(path: str, size: int) -> None:
    """Have a file that was copied have its size again, as QEMU writes whole sectors, and survive a
    loss of power.

    :raises MoveError: if it can't be changed, or not be written.
    """
    try:
        with open(path, "r+b") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_size > size:
                file.truncate(size)
            os.fsync(file.fileno())
    except OSError as error:
        raise MoveError(f"{path}: {error.strerror}") from error


def checksum_of(path: str, *, size: int = 0, look: Callable[[], object] = lambda: None) -> str:
    """The SHA-256 of a file or device.

    :param size: of so many bytes of it; 0 is all.
    :param look: is called now and then; its error ends this.
    """
    found, left = hashlib.sha256(), size or size_in(path)
    try:
        with open(path, "rb", buffering=0) as file:
            while left > 0 and (data := file.read(min(_CHUNK, left))):
                found.update(data)
                left -= len(data)
                look()
    except OSError as error:
        raise MoveError(f"{path}: {error.strerror}") from error
    return found.hexdigest()


def size_in(path: str) -> int:
    """The size of a file or device, in bytes.

    :raises MoveError: if it can't be opened.
    """
    try:
        with open(path, "rb") as file:
            return file.seek(0, os.SEEK_END)
    except OSError as error:
        raise MoveError(f"{path}: {error.strerror}") from error


def copy_key(name: str) -> KeyFolder:
    """Where the key of a move is for these tools, whose root is this process's."""
    place = Path("/run/brine/moves") / f"{name}.copies"
    return KeyFolder(place, place)


def _credentials(key: KeyFolder, endpoint: str) -> str:
    known = {**key.credentials(endpoint), "id": "tls"}
    kind = known.pop("qom-type")
    return ",".join([kind, *(f"{one}={value}" for one, value in known.items())])
