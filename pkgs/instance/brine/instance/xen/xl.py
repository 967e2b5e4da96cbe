"""Asking and telling Xen, by its own command. Source: :manpage:`xl(1)`.

A domain has another number after each start, and may have any name. So whoever acts on one looks
for its UUID first, and names it by the number that was found with that.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from brine.common.errors import BrineError
from brine.common.printable import printable
from brine.instance.xen.domains import Domain, chosen, parse_list
from brine.instance.xen.faults import fault_in

PROGRAM = "xl"

_LIST_TIMEOUT_S = 30.0
_UNPAUSE_TIMEOUT_S = 30.0
_DESTROY_TIMEOUT_S = 120.0  # its devices are taken back, by scripts


class XlError(BrineError):
    """Xen could not be asked, or refused."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What ``xl list`` says.

    :param unknown: rows that nobody understands.
    """

    domains: tuple[Domain, ...]
    unknown: tuple[str, ...] = ()

    def domain_of(self, uuid: str) -> Domain | None:
        """The domain that has this UUID; None if none has. Of several the one that lives.

        :raises XlError: if a row that nobody understands is about it.
        """
        if any(uuid in row for row in self.unknown):
            raise XlError(f"xl list has a row of the domain {uuid} that is not known here")
        return chosen([one for one in self.domains if one.uuid == uuid])


def domains() -> Listing:
    """All domains but the control domain; none where there is no xl at all.

    :raises XlError: if they can't be known.
    """
    if not shutil.which(PROGRAM, path=_path()):
        return Listing(())
    found, unknown = parse_list(_xl("list", "-v", timeout_s=_LIST_TIMEOUT_S))
    return Listing(tuple(found), tuple(unknown))


def domain_of(uuid: str) -> Domain | None:
    """The domain that has this UUID, as it is now.

    :raises XlError: if that can't be known.
    """
    return domains().domain_of(uuid)


def shut_down(number: int, *, timeout_s: float) -> None:
    """Have the guest of a domain be told to shut down, and hear it. It does not wait for its end.

    :raises XlError: if it can't be told, or does not hear it.
    """
    _xl("shutdown", str(number), timeout_s=timeout_s)


def pause(number: int) -> None:
    """Have a domain's processors stand still.

    :raises XlError: if they do not.
    """
    _xl("pause", str(number), timeout_s=_UNPAUSE_TIMEOUT_S)


def unpause(number: int) -> None:
    """Have a domain that is paused go on.

    :raises XlError: if it does not.
    """
    _xl("unpause", str(number), timeout_s=_UNPAUSE_TIMEOUT_S)


def destroy(domain: Domain) -> bool:
    """Have a domain be gone, with its memory, whatever it does; returns whether it was still there.

    :raises XlError: if it does not go.
    """
    there = domains().domains
    if not any((one.number, one.uuid) == (domain.number, domain.uuid) for one in there):
        return False
    _xl("destroy", str(domain.number), timeout_s=_DESTROY_TIMEOUT_S)
    return True


def _xl(*args: str, timeout_s: float) -> str:
    import subprocess  # takes long to load, and many only want a state

    from brine.common.bounded_run import run_bounded

    # Its words are read, so they must not be translated.
    environment = {**os.environ, "LC_ALL": "C", "PATH": _path()}
    try:
        done = run_bounded([PROGRAM, *args], timeout_s=timeout_s, environment=environment)
    except subprocess.TimeoutExpired:
        text = f"xl {' '.join(args)}: no answer within {round(timeout_s, 1):g} s"
        raise XlError(text, hint="systemctl status xen, or xenstored") from None
    except OSError as error:
        hint = "apt install xen-utils; this node must have been booted by Xen"
        raise XlError(f"{PROGRAM}: {error.strerror}", hint=hint) from error
    if done.returncode != 0:
        raise XlError(f"xl {' '.join(args)}: {_fault(done.stderr) or done.returncode}")
    return done.stdout


def _path() -> str:
    """Where programs are, with those that only root has."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _fault(said: str) -> str:
    return printable(fault_in(said.splitlines()) or "")
