"""The key of the cluster that a test's node has, and keys of moves."""

from __future__ import annotations

import os
from pathlib import Path

from brine.common import paths
from brine.moves.cluster_keys import Agreement, ClusterKeys
from brine.moves.move_key import MoveKey

SECRET = b"the cluster's own secret\n"


def give_keys(secret: bytes = SECRET, previous: bytes = b"") -> None:
    """Have this process's node have a key, and the one before it, if there is one."""
    files = [paths.ETC_DIR / "hmac.key", paths.ETC_DIR / "hmac.key.previous"]
    for file, content in zip(files, (secret, previous), strict=True):
        file.unlink(missing_ok=True)
        if content:
            file.write_bytes(content)
            file.chmod(0o600)
    _settings().write_text(f'key_file = "{files[0]}"\nprevious_key_file = "{files[1]}"\n')


def _settings() -> Path:
    return paths.settings_file("confd")


def new_key() -> MoveKey:
    """The key of a move, another one each time."""
    return MoveKey.derived(SECRET, os.urandom(32))


def agreed() -> Agreement:
    """What a target with this node's keys has chosen."""
    keys = ClusterKeys.read()
    return keys.agree(keys.ids(), "n1")
