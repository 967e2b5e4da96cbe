"""The cluster's HMAC key: finding it, reading it, making a new one.

A key is a file's content, byte for byte, a final newline included. While one key replaces
another two are valid, the current and the previous one.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from brine.common.errors import BrineError
from brine.common.files import new_file, read_regular, sync_folder, write_whole

log = logging.getLogger(__name__)

CURRENT = "hmac.key"
"""The name of the current key among a service's credentials, and of its file."""
PREVIOUS = "hmac.key.previous"
SHORTEST = 16
"""In bytes: an attacker who recorded a datagram can try all shorter keys."""

_LARGEST = 64 * 1024
_NEW_KEY_BYTES = 32


class KeyFileError(BrineError):
    """A key file that can't be used."""

    def __init__(self, path: Path, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{path}: {message}", hint=hint)

    @classmethod
    def of(cls, path: Path, what: str, error: OSError) -> KeyFileError:
        """The error for an operation that the system refused."""
        hint = "be root" if isinstance(error, PermissionError) else None
        return cls(path, f"can't be {what}: {error.strerror}", hint=hint)


@dataclass(frozen=True)
class FoundKey:
    """A key, and the file that it came from. It does not show its secret where it is printed."""

    source: Path
    secret: bytes = field(repr=False)
    since_s: float  # when it was written


def load_key(path: Path, *, private: bool = True) -> bytes:
    """The secret in a key file, as it is.

    :param private: log a warning if users other than the file's owner may read it.
    """
    try:
        secret = read_regular(path)
        mode = path.stat().st_mode
    except FileNotFoundError:
        hint = f"brine confd new-key makes one; where the cluster has one, copy it to {path}"
        raise KeyFileError(path, "there is no such key", hint=hint) from None
    except OSError as error:
        raise KeyFileError.of(path, "read", error) from error
    if not secret.strip():
        text = "is blank" if secret else "is empty"
        raise KeyFileError(path, text, hint="copy the cluster's key from another node")
    if len(secret) > _LARGEST:
        raise KeyFileError(path, f"is no key: it has more than {_LARGEST} bytes")
    if private and mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("%s can be read by others than its owner: chmod 600 it", path)
    return secret


def find_keys(
    key_file: Path, previous_key_file: Path, environment: Mapping[str, str] = os.environ
) -> list[FoundKey]:
    """The keys that are valid: the current one, then the previous one, if there is one.

    Each is looked for in ``$RUNTIME_DIRECTORY`` (handed over at a reload), then among the
    service's credentials in ``$CREDENTIALS_DIRECTORY``, then at the path of the settings.

    :raises KeyFileError: if there is no current key, or a key is there and can't be used.
    """
    found = []
    for name, path in ((CURRENT, key_file), (PREVIOUS, previous_key_file)):
        file = _place(name, path, environment)
        if file is None and name == CURRENT:
            raise KeyFileError(path, "there is no current key", hint="brine confd new-key")
        if file is None or (name == PREVIOUS and not file.exists()):
            continue
        # An access list that lets the service's user read a credential looks like the group's.
        secret = load_key(file, private=file == path)
        # A credential is as old as the service: the file itself is better, if it can be seen.
        found.append(FoundKey(file, secret, _written_s(path) or _written_s(file)))
    return found


def _place(name: str, path: Path, environment: Mapping[str, str]) -> Path | None:
    """The file of a key, which may not be there; None if an empty one was handed over.

    A blank credential stands for none: SetCredential= takes none that is empty.
    """
    for variable in ("RUNTIME_DIRECTORY", "CREDENTIALS_DIRECTORY"):
        # Of several directories the first is ours.
        folder = environment.get(variable, "").split(":")[0]
        file = Path(folder, name)
        try:
            is_there = folder != "" and file.exists()
            if is_there and file.read_bytes().strip():
                return file
        except OSError as error:
            raise KeyFileError.of(file, "read", error) from error
        if is_there and variable == "RUNTIME_DIRECTORY":
            return None  # the credential beside it is as old as the service
    return path


def _written_s(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def new_key(path: Path, previous: Path, *, replace: bool = False) -> bool:
    """Make a new random key at *path*: 64 hexadecimal digits and a newline, for its owner only.

    :param previous: where the replaced key is kept, so that both can be valid for a while.
    :returns: whether one was replaced, which is refused while there is a previous one.
    """
    secret = secrets.token_hex(_NEW_KEY_BYTES).encode() + b"\n"
    try:
        if not replace or not path.exists():
            _create(path, secret)
            return False
        if previous.exists():
            hint = "once every node has the current key: brine confd new-key --forget-old"
            raise KeyFileError(previous, "an earlier replacement is not over", hint=hint)
        write_whole(previous, load_key(path), mode=0o600)
        write_whole(path, secret, mode=0o600)
        return True
    except FileExistsError:
        hint = f"--replace makes a new one and keeps the old one as {previous}"
        raise KeyFileError(path, "there is a key already", hint=hint) from None
    except OSError as error:
        raise KeyFileError.of(path, "written", error) from error


def _create(path: Path, secret: bytes) -> None:
    """Write the file whole, and fail if there is one by then: a link replaces nothing."""
    if path.exists():
        raise FileExistsError
    with new_file(path) as descriptor, os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(secret)


def forget_old(path: Path, previous: Path) -> bool:
    """Remove the previous key, so that from the next reload on the current one alone is valid.

    :returns: whether there was one.
    :raises KeyFileError: also if there is no current key that can be used.
    """
    load_key(path)
    try:
        previous.unlink()
        sync_folder(previous.parent)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise KeyFileError.of(previous, "removed", error) from error
    return True


def hand_over_keys(
    key_file: Path, previous_key_file: Path, environment: Mapping[str, str] = os.environ
) -> None:
    """As root, give the keys that are there now to the running daemon, for its next reload.

    Credentials are those of the service's start, and the daemon may not read the files
    themselves. They go into its ``$RUNTIME_DIRECTORY``, for its user only, and are gone with it
    when the service stops. A previous key that is absent becomes an empty file. This process
    becomes that user for good: root should not write where another can put links.
    """
    folder = Path(environment.get("RUNTIME_DIRECTORY", "").split(":")[0])
    if not folder.is_absolute():
        raise KeyFileError(folder, "not started by systemd", hint="systemctl reload brine-confd")
    copies = {CURRENT: (load_key(key_file), _written_s(key_file)), PREVIOUS: (b"", 0.0)}
    if previous_key_file.exists():
        copies[PREVIOUS] = load_key(previous_key_file), _written_s(previous_key_file)
    try:
        owner = folder.stat()
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(*[owner.st_gid] * 3)
            os.setresuid(*[owner.st_uid] * 3)
        for name, (secret, since_s) in copies.items():
            write_whole(folder / name, secret, mode=0o400, durable=False)
            os.utime(folder / name, (since_s, since_s))
    except OSError as error:
        raise KeyFileError.of(folder, "written to", error) from error
