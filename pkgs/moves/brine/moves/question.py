"""The question of a node to its master candidates: whose are the instances that it has?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from brine.common import paths
from brine.common.errors import BrineError, warn
from brine.common.files import text_of
from brine.common.own_addresses import is_own_address
from brine.common.own_node import OwnNode
from brine.confd import questions
from brine.confd.client import (
    AnswerError,
    ConfdClient,
    ConfdError,
    find_peers,
    parse_peer,
)
from brine.confd.keys import find_keys
from brine.confd.protocol import ErrorCode
from brine.confd.questions import Question
from brine.confd.settings import ConfdSettings
from brine.config.model import Configuration
from brine.config.store import read_configuration
from brine.instance.from_config import claim_of
from brine.instance.store import is_this_node
from brine.moves.cluster_keys import confd_settings
from brine.vm.claim import Claim
from brine.vm.spec import Spec

T = TypeVar("T")

_ATTEMPT_S = 5.0
_PAUSE_S = 1.0
_LEAST_S = 0.1

Answers = Mapping[str, Claim | None]
"""The claims of instances, by UUID. None is one that another node can't have by the configuration;
an instance that is not here was not answered in time."""


class Candidates:
    """The master candidates of this node's cluster."""

    def __init__(self, settings: ConfdSettings) -> None:
        self._settings = settings

    @classmethod
    def known(cls) -> Candidates | None:
        """Those that this node knows; None on a host without a cluster."""
        settings = confd_settings()
        ssconf = paths.SSCONF_DIR / "ssconf_master_candidates_ips"
        is_in_cluster = bool(text_of(ssconf)) or settings.config_file.exists()
        return cls(settings) if is_in_cluster and settings.key_file.exists() else None

    def claims_on(self, node: OwnNode, specs: Sequence[Spec], *, timeout_s: float) -> Answers:
        """Whose instances are, as the newest configuration of most candidates has it: one that was
        down when the configuration changed may answer first.

        :param node: this node.
        :param timeout_s: how long all questions may take. The network may not be up yet, or the
            candidates may be booting, too.
        :raises BrineError: if too few have answered by then.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._claims_once(node, specs, deadline)
            except ConfdError as error:
                is_final = isinstance(error, AnswerError) and error.code != ErrorCode.INTERNAL
                if is_final or _left(deadline) <= _PAUSE_S:
                    raise
            time.sleep(_PAUSE_S)

    def _claims_once(self, node: OwnNode, specs: Sequence[Spec], deadline: float) -> Answers:
        settings = self._settings
        found = find_peers(ssconf_dir=paths.SSCONF_DIR, config_file=settings.config_file)
        own = _own_addresses()
        peers = [
            one for one in found if one not in own and not is_own_address(parse_peer(one).host)
        ]
        copy = self._own_copy() if len(peers) < len(found) else None
        if not peers:
            return _claims_in(copy, node, specs)
        # Its own copy may be as old as its last shutdown, and is one of the candidates' all the
        # same: of most of them, one has each change.
        needed = len(found) // 2 + 1 - (copy is not None)
        keys = find_keys(settings.key_file, settings.previous_key_file, {})
        client = ConfdClient(peers, [one.secret for one in keys], port=settings.port)
        question = _Question(client, node, deadline, min(needed, len(peers)))
        if copy and copy.serial_no > question.newest_serial():
            return _claims_in(copy, node, specs)
        return question.claims_of(specs)

    def _own_copy(self) -> Configuration | None:
        """The configuration that this candidate has; None if it can't be used."""
        try:
            return read_configuration(str(self._settings.config_file))
        except BrineError as error:
            warn(f"the configuration of this candidate can't be used: {error}")
            return None


def _claims_in(
    configuration: Configuration | None, node: OwnNode, specs: Sequence[Spec]
) -> Answers:
    """The claims of instances in a candidate's own configuration, if it is the newest."""
    claims = dict[str, Claim]()
    if configuration and node.uuid in configuration.nodes:
        claims = {
            uuid: claim_of(configuration, one)
            for uuid, one in configuration.instances.items()
            if one.primary_node != node.uuid and one.primary_node in configuration.nodes
        }
    return {one.uuid: claims.get(one.uuid) for one in specs}


def _own_addresses() -> frozenset[str]:
    """The primary IPs of this node in the cluster, also while no interface has them yet."""
    lines = text_of(paths.SSCONF_DIR / "ssconf_node_primary_ips").splitlines()
    pairs = (line.split() for line in lines)
    return frozenset(pair[1] for pair in pairs if len(pair) == 2 and is_this_node(pair[0]))


def _left(deadline: float) -> float:
    return deadline - time.monotonic()


class _Question:
    """One question for the instances of this node. If the answer is too large, or for an instance
    that is not among them, one for each instance.

    :param needed: so many candidates must be able to answer.
    """

    def __init__(self, client: ConfdClient, node: OwnNode, deadline: float, needed: int) -> None:
        self._client = client
        self._node = node
        self._deadline = deadline
        self._needed = needed
        self._names = dict[str, str | None]()

    def newest_serial(self) -> int:
        """The serial number of the newest configuration."""
        found = self._ask(questions.config("/serial_no"))
        if type(found) is not int:
            raise ConfdError("the configuration has no serial_no")
        return found

    def claims_of(self, specs: Sequence[Spec]) -> Answers:
        found = dict[str, Claim | None]()
        try:
            answer = self._ask(questions.node_instances(self._node.uuid))
            found = {_in(one, "uuid"): None for one in answer.primary}
        except AnswerError as error:
            if error.code == ErrorCode.UNKNOWN_ENTRY:
                # The configuration does not know this node, so it can't say what is not its.
                return {one.uuid: None for one in specs}
            if error.code != ErrorCode.TOO_LARGE:
                raise
        for spec in specs:
            if spec.uuid in found:
                continue
            if _left(self._deadline) <= 0:
                break
            with suppress(ConfdError):  # of one instance says nothing of the others
                found[spec.uuid] = self._claim_of(spec)
        return found

    def _claim_of(self, spec: Spec) -> Claim | None:
        data = self._found(f"/instances/{spec.uuid}")
        if data is None:
            return None
        node = _in(data, "primary_node")
        if node in (self._node.uuid, self._node.name):
            return None
        if node not in self._names:
            name = self._found(f"/nodes/{node}/name")
            self._names[node] = None if name is None else str(name)
        name = self._names[node]
        return None if name is None else Claim(name, _serial(data))

    def _found(self, pointer: str) -> Any:
        """What is there in the configuration; None if nothing is."""
        try:
            return self._ask(questions.config(pointer))
        except AnswerError as error:
            if error.code in (ErrorCode.ARGUMENT, ErrorCode.UNKNOWN_ENTRY):
                return None
            raise

    def _ask(self, question: Question[T]) -> T:
        timeout_s = min(_ATTEMPT_S, max(_left(self._deadline), _LEAST_S))
        return self._client.ask(
            question,
            coverage=len(self._client.peers),
            at_least=self._needed,
            timeout_s=timeout_s,
        )


def _in(data: Any, key: str) -> str:
    if not isinstance(data, dict) or not isinstance(data.get(key), str):
        raise ConfdError(f"an answer has no {key}")
    return str(data[key])


def _serial(data: Any) -> int:
    serial = data.get("serial_no") if isinstance(data, dict) else None
    if type(serial) is not int or serial < 1:
        raise ConfdError("an answer has no serial_no")
    return serial
