"""The key that signs the package repositories which are made from this tree.

It is made once, without a passphrase, and kept in `.cache/`: a machine that knows it takes the
packages of later builds, too.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.command import run_command
from lab.lock import folder_lock
from lab.machine import require_commands
from lab.tree import TREE

KEY_FILE = TREE / ".cache/repository-key.asc"
OWNER = "Brine packages built from a clone"

_GPG = ["gpg", "--batch", "--quiet", "--pinentry-mode=loopback", "--passphrase="]


@contextmanager
def keyring() -> Iterator[Path]:
    """GnuPG's folder (`GNUPGHOME`) with the key, made if there is none; gone with the context."""
    require_commands("a signed repository", ["gpg", "gpg-agent"])
    # The agent's sockets have to have short names.
    with tempfile.TemporaryDirectory(prefix="brine-gpg-") as scratch:
        home = Path(scratch)
        try:
            KEY_FILE.parent.mkdir(exist_ok=True)
            with folder_lock(KEY_FILE.parent, fcntl.LOCK_EX):
                if KEY_FILE.exists():
                    _gpg(home, "--import", KEY_FILE)
                else:
                    _make_key(home)
            yield home
        finally:
            run_command(["gpgconf", "--homedir", home, "--kill", "all"], check=False)


def public_key(home: Path) -> str:
    """The public key of a keyring, in ASCII armour."""
    return _gpg(home, "--armor", "--export")


def sign(home: Path, text: str) -> str:
    """The text with a signature around it, as apt's `InRelease` has it."""
    return _gpg(home, "--digest-algo=SHA512", "--clear-sign", stdin=text)


def _make_key(home: Path) -> None:
    _gpg(home, "--quick-generate-key", OWNER, "ed25519", "sign", "never")
    secret = _gpg(home, "--armor", "--export-secret-keys")
    new = KEY_FILE.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(secret)
    new.rename(KEY_FILE)


def _gpg(home: Path, *args: str | Path, stdin: str = "") -> str:
    return run_command([*_GPG, "--homedir", home, *args], stdin=stdin, what="gpg").stdout
