"""The Debian releases that the lab knows, and where this machine gets its packages from."""

from __future__ import annotations

import platform
from pathlib import Path

from lab.command import run_command
from lab.errors import LabError

RELEASES = {"bookworm": "12", "trixie": "13"}
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PYTHON_OF_RELEASE = {"bookworm": "3.11", "trixie": "3.13"}

# What decides whether a mirror is reached and believed: proxies, time-outs, snapshots of old dates.
_TRANSPORT_SETTINGS = (
    "Acquire::http",
    "Acquire::https",
    "Acquire::ForceIPv",
    "Acquire::Retries",
    "Acquire::Check-Valid-Until",
    "Acquire::Check-Date",
)


def host_release() -> str:
    """This machine's Debian release, by its code name.

    Raises LabError on anything else than the releases that the lab knows.
    """
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    if release not in RELEASES:
        raise LabError(
            f"this machine is not one of Debian's releases {', '.join(RELEASES)}",
            hint="the lab takes its packages from the machine's own Debian sources",
        )
    return release


def known_release(release: str) -> str:
    """`release` itself; raises LabError when the lab does not know it."""
    if release not in RELEASES:
        raise LabError(f"no such Debian release: {release}", hint=f"known: {', '.join(RELEASES)}")
    return release


def apt_sources(release: str) -> list[str]:
    """One-line apt sources of `release` on the mirrors that this machine itself uses.

    apt is asked for them (apt-get(8), `indextargets`), so that every way to write a source is
    understood. Sources that are not the release itself (its updates, its security fixes) follow it.
    """
    here = host_release()
    # A source may be written with its suite, such as `stable`: the code name says which that is.
    format_ = "$(REPO_URI) $(CODENAME) $(COMPONENT)"
    listing = run_command(
        ["apt-get", "indextargets", "--format", format_, "Identifier: Packages"]
    ).stdout
    sources = []
    for line in listing.splitlines():
        uri, *code_name, component = line.split()
        suite = "".join(code_name)  # not every repository has one
        if component == "main" and (suite == here or suite.startswith(f"{here}-")):
            renamed = release + suite.removeprefix(here)
            sources.append(f"deb [signed-by={KEYRING}] {uri} {renamed} main")
    if not sources:
        raise LabError(
            f"no apt source of this machine has {here}/main",
            hint="see /etc/apt/sources.list and /etc/apt/sources.list.d",
        )
    return list(dict.fromkeys(sources))


def apt_transport_settings() -> list[str]:
    """This machine's apt settings that decide whether a mirror is reached, as apt.conf(5) lines."""
    dump = run_command(["apt-config", "dump"]).stdout.splitlines()
    return [line for line in dump if line.startswith(_TRANSPORT_SETTINGS) and '""' not in line]
