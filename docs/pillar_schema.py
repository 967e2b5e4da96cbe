"""The schema of pillar ``brine:`` and its reference, made of Brine's own dataclasses, of the
formula's defaults and of the comments in the example: `./dev pillar-schema` writes both."""

from __future__ import annotations

import json
import re
import runpy
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from brine.common.schema import NOUNS, KeySchema, shape_of
from brine.confd.settings import ConfdSettings
from brine.config.merge import CLASSES
from brine.config.model import KINDS
from brine.instance.settings import InstanceSettings
from brine.kvmd.settings import KvmdSettings
from brine.lifecycle.settings import LifecycleSettings
from brine.moves.settings import MovesSettings
from brine.vm.spec import Spec
from brine.watcher.settings import WatcherSettings

TREE = Path(__file__).parents[1]
SCHEMA = TREE / "salt/states/brine/schema.json"
REFERENCE = TREE / "docs/pillar.md"
EXAMPLE = TREE / "salt/pillar.example"

_NOUNS: dict[str, str] = runpy.run_path(str(TREE / "salt/states/_states/brine_pillar.py"))["NOUNS"]
_DEFAULTS: dict[str, Any] = runpy.run_path(str(TREE / "salt/states/brine/map.py"))["DEFAULTS"]
_SETTINGS = {
    "kvmd": (KvmdSettings, "brine-kvmd.toml(5)"),
    "confd": (ConfdSettings, "brine-confd.toml(5)"),
    "instance": (InstanceSettings, "brine-instance(1)"),
    "lifecycle": (LifecycleSettings, "brine-lifecycle.toml(5)"),
    "watcher": (WatcherSettings, "brine-watcher.toml(5)"),
    "moves": (MovesSettings, "brine-moves.toml(5)"),
}
_SECRETS = ("confd:key", "confd:previous_key")
_DISTRIBUTED = "What the external pillar adds on a cluster's nodes. It is not written by hand."

Node = dict[str, Any]
"""A JSON Schema: of its words those that the state brine_pillar.valid knows."""

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}


class _Classes:
    """The schemas of classes of data, each once, under the names of the classes."""

    def __init__(self) -> None:
        self.definitions: dict[str, Node] = {}

    def reference(self, kind: type) -> Node:
        """A reference to the schema of a class."""
        if kind.__name__ not in self.definitions:
            self.definitions[kind.__name__] = {}  # one that has itself in it
            self.definitions[kind.__name__] = self._object(kind)
        return {"$ref": f"#/$defs/{kind.__name__}"}

    def properties(self, kind: type) -> dict[str, Node]:
        """The schemas of the keys of a class."""
        hints = typing.get_type_hints(kind)
        keys = shape_of(kind).by_key.items()
        return {key: self._key(hints[what.name], what) for key, what in keys}

    def _object(self, kind: type) -> Node:
        made: Node = {"type": "object", "properties": self.properties(kind)}
        if required := [what.key for what in shape_of(kind).required]:
            made["required"] = required
        return {**made, "additionalProperties": False}

    def _key(self, hint: Any, what: KeySchema) -> Node:
        node = self._value(hint)
        inner = node.get("items", node)
        words = {"minimum": "minimum", "maximum": "maximum", "choices": "enum"}
        for limit, word in words.items():
            if (value := what.limits.get(limit)) not in (None, ()):
                inner[word] = list(value) if word == "enum" else value
        if what.secret:
            node["writeOnly"] = True
        if not what.is_required and what.default is not None and not what.secret:
            default = what.default
            node["default"] = default if isinstance(default, bool | int | float) else _text(default)
        return node

    def _value(self, hint: Any) -> Node:
        if isinstance(hint, types.UnionType):
            (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any:
            return {}
        if origin is dict:
            return {"type": "object", "additionalProperties": self._value(parts[1])}
        if origin in (list, tuple):
            return {"type": "array", "items": self._value(parts[0])}
        if hint in _TYPES:
            pattern = {"pattern": "^/", "title": NOUNS[Path]} if hint is Path else {}
            return {"type": _TYPES[hint], **pattern}
        return self.reference(hint)


def _text(default: Any) -> Any:
    """A default as JSON."""
    if isinstance(default, list | tuple):
        return [_text(one) for one in default]
    return {} if isinstance(default, dict) else str(default)


def schema() -> Node:
    """The schema of pillar: of its key ``brine`` and all that is in it."""
    classes = _Classes()
    comments = dict(_comments(EXAMPLE.read_text()))
    formula = {key: _formula(value, key, comments) for key, value in _DEFAULTS.items()}
    for part, (kind, page) in _SETTINGS.items():
        description = comments[f"{part}:settings"]
        assert page in description
        settings = {"description": description, **classes.reference(kind)}
        formula[part]["properties"]["settings"] = settings
    formula["confd"]["properties"]["key"]["maxLength"] = 64 * 1024
    scripts = formula["hotplug"]["properties"]["scripts"]
    scripts["additionalProperties"] = {"type": "string"}
    scripts["propertyNames"] = {
        "pattern": "^[A-Za-z0-9_-]+$",
        "title": "of letters, digits, - and _",
    }
    bridges = formula["network"]["properties"]["bridges"]
    texts = {"type": "array", "items": {"type": "string"}, "default": []}
    bridges["additionalProperties"] = {
        "type": "object",
        "properties": {
            "uplink": {"type": "string", "default": ""},
            **dict.fromkeys(("addresses", "gateways", "dns"), texts),
            **{key: {"type": "boolean", "default": False} for key in ("dhcp", "vlan_filtering")},
        },
        "additionalProperties": False,
    }
    units = formula["storage"]["properties"]
    units["directories"]["items"] = {"type": "string", "pattern": "^/", "title": NOUNS[Path]}
    units["allocatable"]["additionalProperties"] = {"type": "boolean"}
    instances = formula["instance"]["properties"]["instances"]
    instances["additionalProperties"] = classes.reference(Spec)
    spec = classes.definitions["Spec"]
    spec["required"].remove("name")
    if not spec["required"]:
        del spec["required"]
    # A disk has a path, or Brine makes it by its size.
    disk = classes.definitions["Disk"]
    disk["required"].remove("path")
    if not disk["required"]:
        del disk["required"]
    disk["anyOf"] = [{"required": ["path"]}, {"required": ["size_mib"]}]
    spec["properties"]["absent"] = {"type": "boolean", "default": False}
    sections = {"cluster": _declared("cluster", classes)}
    for section in KINDS:
        sections[section] = {"type": "object", "additionalProperties": _declared(section, classes)}
    distributed = {"type": "object", "description": _DISTRIBUTED}
    brine = {
        "type": "object",
        "properties": {**formula, **sections, "distributed": distributed},
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": "Generated by ./dev pillar-schema. Null, at any key, stands for its default.",
        "type": "object",
        "properties": {"brine": brine},
        "$defs": classes.definitions,
    }


def _formula(default: Any, path: str, comments: Mapping[str, str]) -> Node:
    """The schema of a key of the formula: its type is its default's."""
    node: Node = {"description": comments[path]} if path in comments else {}
    if isinstance(default, dict):
        node["type"] = "object"
        if not default:
            return {**node, "default": {}}
        inner = {key: _formula(one, f"{path}:{key}", comments) for key, one in default.items()}
        return {**node, "properties": inner, "additionalProperties": False}
    if isinstance(default, list):
        return {**node, "type": "array", "default": default}
    node["type"] = _TYPES[bool if default is None else type(default)]
    if path in _SECRETS:
        node["writeOnly"] = True
    return node if default is None else {**node, "default": default}


def _declared(section: str, classes: _Classes) -> Node:
    """The schema of an object of the cluster as people declare it, for "brine config apply"."""
    keys = classes.properties(CLASSES[section])
    for key in keys:
        keys[key].pop("default", None)  # a new object's is another one
    # Those that it has its own way with.
    keys |= {key: {} for key in ("serial_no", "ctime", "mtime")}
    if section == "cluster":
        keys |= {"name": keys["cluster_name"], "master": keys["master_node"]}
        keys["uid_pool"] = {"type": ["string", "integer", "array"]}
        keys["nicparams"] = keys["beparams"] = {"type": "object"}
    elif section == "instances":
        nic = classes.properties(CLASSES["nic"])
        keys["nics"]["items"] = {"type": "object", "properties": nic}
        keys["disks"]["items"] = {"type": ["string", "object"]}
    elif section == "disks":
        keys["children"]["items"] = {"type": "object"}
    # Null takes away what Brine does not know and an old configuration has.
    return {"type": "object", "properties": keys, "additionalProperties": {"type": "null"}}


def _comments(text: str) -> Iterator[tuple[str, str]]:
    """The comment above each key of the example that has one, by the key's path below ``brine``.
    Lines that are indented further are code."""
    path: list[str] = []
    said: list[str] = []
    for line in text.splitlines():
        if comment := re.fullmatch(r" *# ?(.*)", line):
            said.append(comment[1])
        elif key := re.match(r"( *)([\w.-]+):", line):
            path[len(key[1]) // 2 :] = [key[2]]
            if said:
                yield ":".join(path[1:]), _paragraphs(said)
            said = []
        else:
            said = []


def _paragraphs(lines: list[str]) -> str:
    text = ""
    for line in lines:
        if line.startswith("  "):
            text += f"\n{line}"
        else:
            last = text.rpartition("\n")[2]
            text += f"{chr(10) if last.startswith('  ') else ' '}{line}"
    return text.strip()


# The reference.

_HEAD = """\
# Pillar

The formula reads these keys of pillar, all under `brine`. A key that is left empty has its default.
`pillar.example` has each of them.

Pillar is checked before anything changes: a key that is not here, or a value of another type, fails
the state `brine-pillar`, and no other state of the formula runs. `./dev pillar-schema` makes this
page, and `schema.json`, by which that state checks; editors that know JSON Schema can, too.
"""
_CLASSES = {
    "Spec": "an instance",
    "Disk": "a disk",
    "Backing": "a backing file",
    "Nic": "a NIC",
    "OwnerSpec": "an owner",
}


def reference(root: Node) -> str:
    """The reference for people, in Markdown."""
    keys = root["properties"]["brine"]["properties"]
    sections = {key: keys[key] for key in ("cluster", *KINDS)}
    text = _HEAD
    for key, node in keys.items():
        if key not in sections:
            text += f"\n## `{key}`\n{_entry(f'brine:{key}', node, root)}"
    text += "\n## Instances of a node\n\n`brine-spec(5)` explains these keys.\n"
    for name, noun in _CLASSES.items():
        text += f"\n### {noun[0].upper()}{noun[1:]}\n\n{_table(root['$defs'][name])}"
    text += "\n## The cluster\n\n`brine-config.data(5)` explains these keys.\n"
    for key, node in sections.items():
        objects = node["additionalProperties"]
        title = f"`{key}`, by name or UUID" if "properties" in objects else f"`{key}`"
        text += f"\n### {title}\n\n"
        text += _table(objects if "properties" in objects else node, has_defaults=False)
    return text


def _entry(path: str, node: Node, root: Node) -> str:
    """A key of the formula, and those below it."""
    text = ""
    if "description" in node:
        default = f", default `{json.dumps(node['default'])}`" if "default" in node else ""
        text = f"\n`{path}`: {_noun(node)}{default}\n"
    for line in node.get("description", "").splitlines():
        is_code = line.startswith("  ")
        text += f"\n    {line.strip()}\n" if is_code else f"\n{_WRAPPER.fill(line)}\n"
    for key, inner in node.get("properties", {}).items():
        text += _entry(f"{path}:{key}", inner, root)
    if "$ref" in node:
        text += f"\n{_table(root['$defs'][_name(node)])}"
    objects = node.get("additionalProperties")
    if isinstance(objects, dict) and "properties" in objects:
        text += f"\n{_table(objects)}"
    return text


_WRAPPER = textwrap.TextWrapper(100, break_on_hyphens=False)


def _table(node: Node, *, has_defaults: bool = True) -> str:
    """The keys of a mapping."""
    rows = [["key", "value", "default"], ["---"] * 3]
    for key, inner in node["properties"].items():
        default = f"`{json.dumps(inner['default'])}`" if "default" in inner else ""
        rows.append([f"`{key}`", _noun(inner), default])
    columns = 3 if has_defaults else 2
    return "".join(f"| {' | '.join(row[:columns])} |\n" for row in rows)


def _noun(node: Node) -> str:
    """The type of a value, in words."""
    if "$ref" in node:
        return _CLASSES.get(_name(node), "a mapping")
    if node.get("items"):
        return f"a list; each is {_noun(node['items'])}"
    if "enum" in node:
        return " or ".join(f"`{one}`" for one in node["enum"])
    kinds = node.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    text = node.get("title") or " or ".join(_NOUNS[kind] for kind in kinds) or "anything"
    low, high = node.get("minimum"), node.get("maximum")
    if high is not None:
        return f"{text}, {low} to {high}"
    return text if low is None else f"{text}, at least {low}"


def _name(node: Node) -> str:
    name: str = node["$ref"].rpartition("/")[2]
    return name


def files() -> dict[Path, str]:
    """The files that are generated, and what is to be in them."""
    root = schema()
    text = json.dumps(root, indent=1, ensure_ascii=False) + "\n"
    return {SCHEMA: text, REFERENCE: reference(root)}


if __name__ == "__main__":
    for file, text in files().items():
        file.write_text(text)
        print(file.relative_to(TREE))
