"""The key of one move: both sides prove that they have it, and it encrypts what they send.

Both derive it from the cluster's key by HKDF, see :mod:`brine.moves.cluster_keys`. QEMU reads it
from a file, as a target at each connection. So the file stays until the move's end, in a folder
that QEMU reaches after it has become another user in another root.

Sources: RFC 5869 (HKDF); "TLS setup for network services" in QEMU's documentation
(``tls-creds-psk``).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from brine.common.errors import BrineError
from brine.common.files import write_whole

NONCE_BYTES = 32
_BYTES = 32
ID_BYTES = 8
_USER = "brine"
_FILE = "keys.psk"


class MoveKeyError(BrineError):
    """A key that can't be used, or not be written."""


def hexadecimal(text: Any, size: int) -> bytes:
    """The bytes that a hexadecimal text of another node says.

    :raises MoveKeyError: unless they are *size*.
    """
    with contextlib.suppress(ValueError, TypeError):
        if len(found := bytes.fromhex(text)) == size and len(text) == 2 * size:
            return found
    raise MoveKeyError(f"{2 * size} hexadecimal digits are missing")


def id_of(secret: bytes) -> str:
    """The id of a key of the cluster, which everyone may know."""
    return hmac.digest(secret, b"brine-move key id", "sha256")[:ID_BYTES].hex()


class MoveKey(NamedTuple):
    """A key: *text* is hexadecimal. It is for one move, and no one but its two nodes has it."""

    text: str

    @classmethod
    def derived(cls, secret: bytes, nonce: bytes, *context: str) -> MoveKey:
        """The key that all make of the same parts: HKDF with SHA-256, of one block.

        :param nonce: makes it another one each time; it is no secret.
        """
        extracted = hmac.digest(nonce, secret, "sha256")
        info = _joined(b"brine-move key", *(one.encode() for one in context))
        return cls(hmac.digest(extracted, info + b"\1", "sha256").hex())

    @classmethod
    def of(cls, text: str) -> MoveKey:
        """The key that a record has.

        :raises MoveKeyError: if it is none.
        """
        return cls(hexadecimal(text, _BYTES).hex())

    def proof(self, *parts: bytes) -> bytes:
        """What only those who have the key can say of *parts*; 32 bytes."""
        return hmac.digest(bytes.fromhex(self.text), _joined(*parts), "sha256")

    def sealed(self, data: bytes, *parts: bytes) -> bytes:
        """*data* as only those who have the key can read it; and what is sealed, as it was.

        :param parts: name it. Whatever else is sealed has other ones: else both could be read.
        """
        # The seed is random for all others, and SHAKE256 makes as many such bytes of it as wanted.
        stream = hashlib.shake_256(self.proof(b"seal", *parts)).digest(len(data))
        mixed = int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")
        return mixed.to_bytes(len(data), "big")


def _joined(*parts: bytes) -> bytes:
    """Parts as one text, from which no other parts are made."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


class KeyFolder(NamedTuple):
    """The folder of a key's file.

    :param path: as this process finds it; *seen* is how QEMU does, which may have another root.
    """

    path: Path
    seen: Path

    def write(self, key: MoveKey, user: int | None = None) -> None:
        """Write the file with the key of QEMU's connections, which is derived of the move's, for
        QEMU alone; one that is there is replaced.

        :param user: the id of QEMU's user; None is this process's.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A guest that has broken out of QEMU has what QEMU has, and must not speak for Brine.
            text = f"{_USER}:{key.proof(b'tls').hex()}\n".encode()
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
