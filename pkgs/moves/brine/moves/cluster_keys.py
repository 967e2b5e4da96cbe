"""The keys of the cluster, out of which both nodes of a move derive the key of that move.

Every node has the cluster's key, and while one replaces another, both. So no key goes from node to
node: the source's offer has the ids of its keys, the target takes one of these that it has too,
and its answer has that id and a number used once. Ids and numbers tell nothing of a key.

The derived key is recorded on each node when its part of the move begins. A cluster's key that is
replaced later changes nothing for the move.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from brine.common import paths
from brine.common.errors import BrineError, warn
from brine.common.settings import load
from brine.confd.keys import KeyFileError, find_keys
from brine.confd.settings import ConfdSettings
from brine.moves.migration import MoveError
from brine.moves.move_key import ID_BYTES, NONCE_BYTES, MoveKey, hexadecimal, id_of
from brine.moves.records import AskedStep

_HINT = "salt-run brine.rotate_key gives all nodes of the cluster one key"


def confd_settings() -> ConfdSettings:
    """The settings of the cluster's daemon, which say where its keys are. A mistake in them is a
    warning: the defaults hold."""
    try:
        return load(ConfdSettings, paths.settings_file("confd"))
    except BrineError as error:
        warn(f"{error}; the defaults are used", hint=error.hint)
        return ConfdSettings()


class Agreement(NamedTuple):
    """Of which key of the cluster, and which number used once, the key of a move is derived.

    :param key_id: of the cluster's key; *nonce* is hexadecimal. Everyone may know both.
    """

    key_id: str
    nonce: str

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Agreement:
        """:raises MoveKeyError: if there is none."""
        return cls(
            hexadecimal(data.get("key_id"), ID_BYTES).hex(),
            hexadecimal(data.get("nonce"), NONCE_BYTES).hex(),
        )


class ClusterKeys:
    """The keys of the cluster that this node has.

    :param known: the secrets, by their ids; the current one first.
    """

    def __init__(self, known: Mapping[str, bytes]) -> None:
        self._known = known

    @classmethod
    def read(cls) -> ClusterKeys:
        """:raises MoveError: if this node has none."""
        settings = confd_settings()
        try:
            found = find_keys(settings.key_file, settings.previous_key_file, {})
        except KeyFileError as error:
            text = f"without the cluster's key nothing moves: {error}"
            raise MoveError(text, hint=_HINT) from error
        return cls({id_of(one.secret): one.secret for one in found})

    def ids(self) -> list[str]:
        """The ids of all keys, for the other node."""
        return [*self._known]

    def agree(self, ids: Sequence[str], source: str) -> Agreement:
        """Choose a key that both nodes have, and a number that was never used.

        :param ids: of the keys of the other node, the *source* of the move.
        :raises MoveError: if they have none in common.
        """
        for one in self._known:
            if one in ids:
                return Agreement(one, secrets.token_hex(NONCE_BYTES))
        text = f"{source} and this node have no key of the cluster in common"
        raise MoveError(text, hint=_HINT)

    def key_for(self, agreement: Agreement, *context: str) -> MoveKey:
        """The key of a move.

        :param context: what both nodes know of the move: another move has another key.
        :raises MoveError: if this node does not have that key of the cluster any more.
        """
        secret = self._known.get(agreement.key_id)
        if secret is None:
            text = "the cluster's key that the target has chosen is not here any more"
            raise MoveError(text, hint="move it again")
        return MoveKey.derived(secret, bytes.fromhex(agreement.nonce), *context)


def key_of_move(agreement: Agreement, asked: AskedStep) -> MoveKey:
    """The key of the move that the master asks this node to take part in."""
    nodes = (str(asked.facts[one]) for one in ("source", "target"))
    context = (asked.move_id, asked.uuid, *nodes, str(asked.serial))
    return ClusterKeys.read().key_for(agreement, *context)
