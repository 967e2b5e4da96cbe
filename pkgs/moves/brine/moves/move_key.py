"""The key of one move: both sides prove that they have it, and it encrypts what they send.

QEMU reads it from a file, as a target at each connection. So the file stays until the move's end,
in a folder that QEMU reaches after it has become another user in another root.

Source: "TLS setup for network services" in QEMU's documentation (``tls-creds-psk``).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import shutil
from pathlib import Path
from typing import NamedTuple

from brine.common.errors import BrineError
from brine.common.files import write_whole

_BYTES = 32
_USER = "brine"
_FILE = "keys.psk"


class MoveKeyError(BrineError):
    """A key that can't be used, or not be written."""


class MoveKey(NamedTuple):
    """A key: *text* is hexadecimal. It is made for one move, and goes to its two nodes alone."""

    text: str

    @classmethod
    def new(cls) -> MoveKey:
        """Another key than any before."""
        return cls(secrets.token_hex(_BYTES))

    @classmethod
    def of(cls, text: str) -> MoveKey:
        """The key that another node has sent.

        :raises MoveKeyError: if it is none.
        """
        with contextlib.suppress(ValueError):
            if len(bytes.fromhex(text)) == _BYTES and len(text) == 2 * _BYTES:
                return cls(text)
        raise MoveKeyError("the key of a move has 64 hexadecimal digits")

    def proof(self, *parts: bytes) -> bytes:
        """What only those who have the key can say of *parts*; 32 bytes."""
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(bytes.fromhex(self.text), message, "sha256")


class KeyFolder(NamedTuple):
    """The folder of a key's file.

    :param path: as this process finds it; *seen* is how QEMU does, which may have another root.
    """

    path: Path
    seen: Path

    def write(self, key: MoveKey, user: int | None = None) -> None:
        """Write a key's file, for QEMU alone; one that is there is replaced.

        :param user: the id of QEMU's user; None is this process's.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = f"{_USER}:{key.text}\n".encode()
            write_whole(self.path / _FILE, text, mode=0o400, owner=user, alone=True)
            if user is not None:
                os.chown(self.path, user, -1)
        except OSError as error:
            raise MoveKeyError(f"{self.path}: can't be written: {error.strerror}") from error

    def remove(self) -> None:
        """Remove the folder, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    def credentials(self, endpoint: str) -> dict[str, str]:
        """QEMU's object for the key, without its id.

        :param endpoint: ``client`` or ``server``.
        """
        user = {"username": _USER} if endpoint == "client" else {}
        return {"qom-type": "tls-creds-psk", "dir": str(self.seen), "endpoint": endpoint, **user}
