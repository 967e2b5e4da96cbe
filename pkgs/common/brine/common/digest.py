"""SHA-256 without :mod:`hashlib`, which loads OpenSSL: that takes longer than all digests of a
command."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 12):
    from _sha2 import sha256 as _sha256
else:
    from _sha256 import sha256 as _sha256


def sha256(data: bytes) -> bytes:
    """The digest of *data*, 32 bytes."""
    digest: bytes = _sha256(data).digest()
    return digest
