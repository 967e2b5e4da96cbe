"""The settings of ``/etc/brine/confd.toml``; see brine-confd.toml(5)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from brine.common import paths
from brine.common.journal import LEVELS
from brine.common.settings import setting
from brine.confd import protocol


def _bind_fault(text: str) -> str | None:
    if not text.split():
        return 'names no address; "::" listens on every address'
    for address in text.split():
        try:
            ipaddress.ip_address(address)
        except ValueError:
            return f"must be IP addresses separated by blanks, but has {address!r}"
    return None


@dataclass(frozen=True)
class ConfdSettings:
    """Settings of brine-confd, as brine-confd.toml(5) explains them."""

    bind: str = setting("::", check=_bind_fault)
    port: int = setting(protocol.PORT, minimum=1, maximum=65535)
    workers: int = setting(1, minimum=1, maximum=64)
    config_file: Path = paths.CONFIG_FILE
    key_file: Path = paths.KEY_FILE
    previous_key_file: Path = paths.PREVIOUS_KEY_FILE
    max_clock_skew_s: float = setting(float(protocol.MAX_CLOCK_SKEW_S), minimum=1, maximum=86400)
    reveal_secrets: bool = False
    memory_lock: bool = False
    log_level: str = setting("info", choices=tuple(LEVELS))

    def addresses(self) -> list[str]:
        """The addresses of *bind*, each once."""
        return list(dict.fromkeys(self.bind.split()))
