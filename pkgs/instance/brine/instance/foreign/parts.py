"""The parts of an XML definition, read so that none is lost in silence.

A :class:`Part` is an element that notes which of its attributes, texts and elements were read.
:meth:`Definition.lost` names all others, and those that a reader has named itself.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from xml.etree.ElementTree import Element

from brine.common.errors import BrineError

MOST_BYTES = 16 << 20
"""The size of the largest definition that is read."""

_MOST_ELEMENTS = 20_000
_DEEPEST = 40
_LONGEST_LINE = 400
_TEXT, _WHOLE = "", "*"  # in the place of an attribute's name
_SECRETS = frozenset({"passwd", "password"})


class _BoundedBuilder(ElementTree.TreeBuilder):
    """A builder that refuses entities, which can make a small file large, and hostile sizes."""

    def __init__(self) -> None:
        super().__init__()
        self._elements = self._depth = 0

    def doctype(self, *_: str | None) -> None:
        raise BrineError("has a document type, which no domain's definition has")

    def start(self, tag: str, attributes: dict[str, str], /) -> Element:
        self._elements += 1
        self._depth += 1
        if self._elements > _MOST_ELEMENTS:
            raise BrineError(f"has more than {_MOST_ELEMENTS} elements")
        if self._depth > _DEEPEST:
            raise BrineError(f"has elements more than {_DEEPEST} deep in each other")
        return super().start(tag, attributes)

    def end(self, tag: str, /) -> Element:
        self._depth -= 1
        return super().end(tag)


class Part:
    """An element, or the absence of one, which is false and has nothing.

    >>> disk = Definition(xml).root.first("devices/disk")
    >>> disk.get("type"), disk.first("source").get("file")
    """

    def __init__(
        self, definition: Definition, element: Element, path: str, *, is_there: bool
    ) -> None:
        self._definition, self._element, self._is_there = definition, element, is_there
        self.path = path

    def __bool__(self) -> bool:
        return self._is_there

    def get(self, name: str) -> str:
        """An attribute, which counts as read; empty if it is not there."""
        self._definition.read.add((self._element, name))
        return self._element.get(name, "").strip()

    def text(self) -> str:
        """The text, which counts as read."""
        self._definition.read.add((self._element, _TEXT))
        return (self._element.text or "").strip()

    def first(self, path: str) -> Part:
        """The first element at *path*. Elements on the way are not read by that."""
        here, where = self._element, self.path
        for tag in path.split("/"):
            found = here.find(tag)
            if found is None:
                return Part(self._definition, Element(tag), f"{where}/{tag}", is_there=False)
            where = f"{where}/{tag}".lstrip("/")
            here = found
            self._definition.visited.add(here)
        return Part(self._definition, here, where, is_there=True)

    def all(self, path: str) -> list[Part]:
        """All elements at *path*."""
        above, _, tag = path.rpartition("/")
        parent = self.first(above) if above else self
        found = parent._element.findall(tag)
        self._definition.visited.update(found)
        where = f"{parent.path}/{tag}".lstrip("/")
        return [Part(self._definition, one, where, is_there=True) for one in found]

    def label(self, text: str) -> None:
        """Distinguish it from others of its name, where something of it is named."""
        if text:
            self.path = f"{self.path}[{text}]"
            self._definition.labels[self._element] = text

    def expect(self, name: str, *usual: str) -> None:
        """Read an attribute that changes nothing if it is *usual* or not there; name it if not."""
        if self.get(name) not in ("", *usual):
            self.lose(name)

    def choice(self, name: str, known: Mapping[str, str], why: str = "") -> str:
        """The spec's word for an attribute; empty if it has none, and then it is named."""
        value = self.get(name)
        if value and value not in known:
            self.lose(name, why)
        return known.get(value, "")

    def lose(self, name: str = "", why: str = "") -> None:
        """Name an attribute that the spec does not have, or the whole element."""
        if name:
            self._definition.read.add((self._element, name))
            what = f"{self.path} {_shown(name, self._element.get(name, ''))}"
        else:
            self.skip()
            what = f"{self.path}{_described(self._element)}"
        self._definition.named.append(_cut(what) + (f": {why}" if why else ""))

    def skip(self) -> None:
        """Count it as read with all that it has, as the other program's bookkeeping."""
        self._definition.read.add((self._element, _WHOLE))


class Definition:
    """The definition in an XML file."""

    def __init__(self, xml: bytes) -> None:
        """
        :raises BrineError: if it is no XML, or none that a program would write.
        """
        if len(xml) > MOST_BYTES:
            raise BrineError(f"is larger than {MOST_BYTES >> 20} MiB")
        try:
            element = ElementTree.fromstring(xml, ElementTree.XMLParser(target=_BoundedBuilder()))
        except (ElementTree.ParseError, ValueError, LookupError) as error:
            # The latter two are those of an encoding that the parser does not have.
            raise BrineError(f"is no XML: {error}") from error
        self.read: set[tuple[Element, str]] = set()
        self.visited = {element}
        self.labels: dict[Element, str] = {}
        self.named: list[str] = []
        self.tag = element.tag
        self.root = Part(self, element, "", is_there=True)
        self._element = element

    def lost(self, quiet: frozenset[str]) -> list[str]:
        """What was named, and then what was not read, in the order of the file.

        :param quiet: the names of elements that are bookkeeping wherever they are.
        """
        return list(dict.fromkeys([*self.named, *self._unread(quiet)]))

    def _unread(self, quiet: frozenset[str]) -> Iterator[str]:
        ahead = [(self._element, "")]
        while ahead:
            element, path = ahead.pop()
            if (element, _WHOLE) in self.read:
                continue
            if element not in self.visited:
                yield _cut(f"{path}{_described(element)}")
                continue
            label = self.labels.get(element)
            path += f"[{label}]" if label else ""
            where = path or _name(element.tag)
            for name, value in element.attrib.items():
                if (element, name) not in self.read:
                    yield _cut(f"{where} {_shown(name, value)}")
            text = (element.text or "").strip()
            if text and (element, _TEXT) not in self.read:
                yield _cut(f"{where} {text}")
            for child in reversed(element):
                if child.tag not in quiet:
                    ahead.append((child, f"{path}/{_name(child.tag)}".lstrip("/")))


def _described(element: Element) -> str:
    """All that an element has, in words: its attributes, its text, and its elements."""
    words = [_shown(name, value) for name, value in element.attrib.items()]
    words += [text] if (text := (element.text or "").strip()) else []
    inner = [f"{_name(child.tag)}{_described(child)}" for child in element]
    words += [f"({', '.join(inner)})"] if inner else []
    return "".join(f" {word}" for word in words)


def _shown(name: str, value: str) -> str:
    return _name(name) if name in _SECRETS else f"{_name(name)}={value}"


def _name(tag: str) -> str:
    """The name of an element or attribute, without the address of its namespace."""
    return tag.rpartition("}")[2]


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."
