"""The profiles that firewalls find in the package of the configuration daemon."""

from __future__ import annotations

import configparser
from pathlib import Path
from xml.etree import ElementTree

from brine.confd.protocol import PORT

SYSTEM = Path(__file__).parents[2] / "pkgs/confd/system"


def test_firewalld_opens_the_port() -> None:
    service = ElementTree.parse(SYSTEM / "brine-confd.xml").getroot()
    (port,) = service.findall("port")
    assert port.attrib == {"protocol": "udp", "port": str(PORT)}


def test_ufw_opens_the_port() -> None:
    profile = configparser.RawConfigParser()
    profile.read(SYSTEM / "ufw/brine-confd")
    assert profile.get("Brine confd", "ports") == f"{PORT}/udp"
    assert profile.options("Brine confd") == ["title", "description", "ports"]
