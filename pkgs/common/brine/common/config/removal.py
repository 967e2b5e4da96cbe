"""What an input removes although something refers to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from brine.common.config.configuration import Configuration
from brine.common.config.draft import Draft
from brine.common.config.params import Mistake
from brine.common.config.references import NOUNS
from brine.common.config.shape import member


def told(faults: Sequence[Mistake], draft: Draft, new: Configuration) -> list[Mistake]:
    """*faults* of *new* in which what is removed has its name: by itself the new configuration
    knows no more of it than the UUID that something refers to."""
    if not faults:
        return []
    named = [_named(fault, draft) for fault in faults]
    of_instances = {(fault.where, fault.text) for fault in named}
    disks = {
        member("/disks", disk): (instance.name, index)
        for instance in new.instances.values()
        for index, disk in enumerate(instance.disks)
    }
    result = []
    for old, fault in zip(faults, named, strict=True):
        owner, index = disks.get("/".join(fault.where.split("/")[:3]), ("", 0))
        if fault is old or not owner:
            result.append(fault)
        elif (f"/instances/{owner}/primary_node", fault.text) not in of_instances:
            # Else it follows its instance: there is only one word that is wrong.
            text = f"{fault.text}, and disk {index} of {owner} is on it"
            result.append(dataclasses.replace(fault, text=text))
    return result


def _named(fault: Mistake, draft: Draft) -> Mistake:
    if fault.kind != "dangling":
        return fault
    for section, noun in NOUNS.items():
        for uuid in draft.removed[section]:
            is_key = fault.where.endswith(f"/{uuid}")  # as the networks of a group
            if is_key or uuid in fault.text:
                name = draft.old[section][uuid].name
                where = (
                    member(fault.where.removesuffix(f"/{uuid}"), name) if is_key else fault.where
                )
                return Mistake(where, f"the {noun} {name} is being removed", fault.kind)
    return fault
