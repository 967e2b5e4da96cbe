"""Which instances are whose: the other ones of this node, and those of other nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from brine.common.instance_specs import specs_but
from brine.instance import spec_files
from brine.instance.spec import AdminState, Spec

ELSEWHERE = "do that on its node; or leave out node, or change it, if it is to move here"


def is_here(spec: Spec) -> bool:
    """Whether a spec may be this node's: it says no other one. A short name means the whole one."""
    here, said = os.uname().nodename.lower(), spec.node.lower()
    return not said or here == said or _short(here) == said or here == _short(said)


def refuse_elsewhere(spec: Spec) -> None:
    """Refuse to start an instance that is another node's.

    :raises InstanceError: whose.
    """
    if not is_here(spec):
        text = f"is {spec.node}'s, and this is {os.uname().nodename}"
        raise spec_files.InstanceError(spec.name, text, hint=ELSEWHERE)


def _short(name: str) -> str:
    return name.partition(".")[0]


def cluster_name() -> str:
    """The name of the cluster; empty where there is none."""
    from brine.common.config.ssconf import Ssconf  # most have nothing to ask it
    from brine.common.config.ssconf_values import SsconfError

    try:
        return Ssconf().cluster_name()
    except SsconfError:
        return ""


def other_specs(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All specs but that of *name*, as JSON, by their instances. One that is offline does not
    count: it does not run. Nor does a damaged one, which others tell."""
    for other, data in specs_but(name, spec_files.FOLDER):
        if data.get("admin_state") != AdminState.OFFLINE:
            yield other, data
