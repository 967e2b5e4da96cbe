"""The question of a node to its master candidates: whose are the instances that it has?"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.own_node import noted_node
from brine.common.settings import load
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
from brine.confd.settings import ConfdSettings
from brine.config.store import read_configuration
from brine.instance.from_config import claim_of
from brine.instance.store import is_this_node
from brine.vm.claim import Claim
from brine.vm.spec import Spec

_ATTEMPT_S = 5.0
_PAUSE_S = 1.0

ClaimsByUuid = Mapping[str, Claim]
"""The claims of the instances that the configuration has, by the UUIDs of these."""


class Candidates:
    """The master candidates of this node's cluster."""

    def __init__(self, settings: ConfdSettings) -> None:
        self._settings = settings

    @classmethod
    def known(cls) -> Candidates | None:
        """Those that this node knows; None on a host without a cluster."""
        settings = load(ConfdSettings, paths.settings_file("confd"))
        ssconf = paths.SSCONF_DIR / "ssconf_master_candidates_ips"
        is_in_cluster = ssconf.exists() or settings.config_file.exists()
        return cls(settings) if is_in_cluster and settings.key_file.exists() else None

    def others(self) -> list[str]:
        """The addresses of those that are not this node. Its own copy of the configuration may be
        as old as its last shutdown.

        :raises ConfdError: if the candidates can't be found out.
        """
        found = find_peers(ssconf_dir=paths.SSCONF_DIR, config_file=self._settings.config_file)
        own = _own_addresses()
        return [one for one in found if one not in own and not is_own_address(parse_peer(one).host)]

    def claims_on(self, node: str, specs: Sequence[Spec], *, timeout_s: float) -> ClaimsByUuid:
        """Whose instances are, as the newest of the candidates' configurations has it.

        :param node: the UUID or the name of this node.
        :param timeout_s: how long to ask at most. The network may not be up yet, or the candidates
            may be booting, too.
        :raises BrineError: if none has answered by then.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                return self._claims_once(node, specs, min(_ATTEMPT_S, max(left_s, 1.0)))
            except ConfdError as error:
                is_final = isinstance(error, AnswerError) and error.code != ErrorCode.INTERNAL
                if is_final or left_s <= _PAUSE_S:
                    raise
            time.sleep(_PAUSE_S)

    def _claims_once(self, node: str, specs: Sequence[Spec], timeout_s: float) -> ClaimsByUuid:
        if not (peers := self.others()):
            # No other node can have changed the configuration.
            configuration = read_configuration(str(self._settings.config_file))
            every = configuration.instances.values()
            return {one.uuid: claim_of(configuration, one) for one in every}
        settings = self._settings
        keys = find_keys(settings.key_file, settings.previous_key_file, {})
        client = ConfdClient(peers, [one.secret for one in keys], port=settings.port)
        return _claims_from(client, node, specs, timeout_s)


def own_reference() -> str:
    """How to name this node to others: the UUID of the node that it was last, or its host name."""
    noted = noted_node()
    return noted.uuid if noted else socket.gethostname()


def is_own_address(host: str) -> bool:
    """Whether an IP address is one of this node's now."""
    try:
        address = ipaddress.ip_address(host)
        if _text(Path(f"/proc/sys/net/ipv{address.version}/ip_nonlocal_bind")) == "1":
            return False  # a socket can have any address
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.bind((host, 0))
    except (OSError, ValueError):
        return False
    return True


def _own_addresses() -> frozenset[str]:
    """The primary IPs of this node in the cluster, also while no interface has them yet."""
    lines = _text(paths.SSCONF_DIR / "ssconf_node_primary_ips").splitlines()
    pairs = (line.split() for line in lines)
    return frozenset(pair[1] for pair in pairs if len(pair) == 2 and is_this_node(pair[0]))


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _claims_from(
    client: ConfdClient, node: str, specs: Sequence[Spec], timeout_s: float
) -> ClaimsByUuid:
    """One question for the instances of this node, and one for each instance that is not among
    them."""
    found = _own_claims(client, node, timeout_s)

    @cache
    def name_of(uuid: str) -> str:
        return str(client.ask(questions.config(f"/nodes/{uuid}/name"), timeout_s=timeout_s))

    for spec in specs:
        if spec.uuid in found:
            continue
        question = questions.config(f"/instances/{spec.uuid}")
        try:
            data = client.ask(question, timeout_s=timeout_s)
        except AnswerError as error:
            if error.code in (ErrorCode.ARGUMENT, ErrorCode.UNKNOWN_ENTRY):
                continue  # it is not in the configuration
            raise
        found[spec.uuid] = Claim(name_of(_in(data, "primary_node")), _serial(data))
    return found


def _own_claims(client: ConfdClient, node: str, timeout_s: float) -> dict[str, Claim]:
    try:
        answer = client.ask(questions.node_instances(node), timeout_s=timeout_s)
    except AnswerError as error:
        # They are too many for a datagram, or this node has left the cluster.
        if error.code in (ErrorCode.TOO_LARGE, ErrorCode.UNKNOWN_ENTRY):
            return {}
        raise
    # The name of this node there need not be this host's; what counts is that it is this node.
    return {_in(one, "uuid"): Claim("", _serial(one)) for one in answer.primary}


def _in(data: Any, key: str) -> str:
    if not isinstance(data, dict) or not isinstance(data.get(key), str):
        raise ConfdError(f"an answer has no {key}")
    return str(data[key])


def _serial(data: Any) -> int:
    serial = data.get("serial_no") if isinstance(data, dict) else None
    if type(serial) is not int or serial < 1:
        raise ConfdError("an answer has no serial_no")
    return serial
