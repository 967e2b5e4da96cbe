"""Domains of libvirt's, as other programs and people write them: no part is lost in silence."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import pytest

from brine.common.errors import BrineError
from brine.instance.foreign.libvirt import spec_of_domain
from brine.instance.validate import completed

FOLDER = Path(__file__).parent / "domains"
DOMAINS = {one.stem: one.read_bytes() for one in sorted(FOLDER.iterdir())}

BOOKKEEPING = {"address", "alias", "seclabel", "metadata"}
"""Elements that libvirt makes for itself, and notes, which are named as a whole."""
BOOKKEEPING_PATHS = {
    "domain id",
    "devices/console tty",
    "devices/disk/source index",
    "devices/channel/target state",
    "devices/graphics passwd",  # which is never printed
    "devices/controller index",
    "devices/controller model",
    "devices/controller/model name",
    "devices/controller/target chassis",
    "devices/controller/target port",
    "devices/disk/target dev",
}
"""Attributes of a running domain, places of devices, and their names on the node."""


def read(root: Element | bytes) -> tuple[dict[str, Any], list[str]] | str:
    """The spec and what is lost, or the error."""
    xml = root if isinstance(root, bytes) else ElementTree.tostring(root)
    try:
        return spec_of_domain(xml, link="br7", storages={"fast": "/srv/fast"})
    except BrineError as error:
        assert "\n" not in str(error)
        return str(error)


def elements(element: Element, path: str = "") -> Iterator[tuple[Element, str]]:
    """The elements of a domain that are no bookkeeping, with their paths."""
    yield element, path or "domain"
    for child in element:
        if child.tag not in BOOKKEEPING:
            yield from elements(child, f"{path}/{child.tag}".lstrip("/"))


def silent(domain: str, changes: Callable[[Element], Iterator[str]]) -> list[str]:
    """The changes of a domain that change neither its spec nor what is named.

    :param changes: makes one change of an element after the other, tells where, and undoes it.
    """
    root = ElementTree.fromstring(DOMAINS[domain])
    before = read(root)
    return [
        f"{path}{what}"
        for element, path in elements(root)
        for what in changes(element)
        if f"{path}{what}" not in BOOKKEEPING_PATHS and read(root) == before
    ]


@pytest.mark.parametrize("domain", DOMAINS)
def test_each_of_them_is_accepted(domain: str) -> None:
    found = read(DOMAINS[domain])
    assert not isinstance(found, str), found
    completed(found[0])


@pytest.mark.parametrize("domain", DOMAINS)
def test_each_attribute_is_used_or_named(domain: str) -> None:
    """Another value changes the spec or what is named, or is an error."""

    def other_values(element: Element) -> Iterator[str]:
        for name, value in dict(element.attrib).items():
            element.set(name, "odd")
            yield f" {name}"
            element.set(name, value)

    assert silent(domain, other_values) == []


@pytest.mark.parametrize("domain", DOMAINS)
def test_each_text_is_used_or_named(domain: str) -> None:
    def other_text(element: Element) -> Iterator[str]:
        text, element.text = element.text, "odd"
        yield ""
        element.text = text

    assert silent(domain, other_text) == []


@pytest.mark.parametrize("domain", DOMAINS)
def test_what_no_libvirt_has_yet_is_named(domain: str) -> None:
    def additions(element: Element) -> Iterator[str]:
        element.set("new", "1")
        yield " new"
        del element.attrib["new"]
        added = ElementTree.SubElement(element, "newer")
        yield "/newer"
        element.remove(added)

    assert silent(domain, additions) == []
