"""Letting a fresh machine reach the package mirrors in the way that the host reaches them."""

from __future__ import annotations

import configparser
import io
from pathlib import Path

from lab.command import run_command
from lab.machine import Machine

_CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_CA_BUNDLE_INSIDE = "/etc/ssl/certs/lab-ca-bundle.crt"


def open_the_way_to_mirrors(machine: Machine) -> None:
    """Give a machine the host's pip configuration and the certificates that the host believes."""
    settings = _pip_settings()
    if _CA_BUNDLE.exists():
        machine.write(_CA_BUNDLE_INSIDE, _CA_BUNDLE.read_text())
        settings["cert"] = _CA_BUNDLE_INSIDE
    configuration = configparser.RawConfigParser()
    configuration["global"] = settings
    text = io.StringIO()
    configuration.write(text)
    machine.write("/etc/pip.conf", text.getvalue())


def _pip_settings() -> dict[str, str]:
    """The host's settings that decide whether pip reaches an index; empty without a pip.

    Folders of the host's own, which may stand in for an index there, are left out.
    """
    found: dict[str, str] = {}
    for key in ("index-url", "trusted-host", "proxy"):
        pip = ["/usr/bin/python3", "-m", "pip", "config", "get"]
        for scope in ("global", ":env:"):
            value = run_command([*pip, f"{scope}.{key}"], check=False).stdout.strip()
            if value and "file:" not in value:
                found[key] = value
    return found
