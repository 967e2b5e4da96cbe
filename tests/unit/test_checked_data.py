"""Dataclasses out of JSON: what is good, and how each fault is named, with its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from brine.common.schema import SchemaError, key, parse


@dataclass(frozen=True)
class Wheel:
    size: int = key(minimum=1)
    label: str | None = None


@dataclass(frozen=True)
class Car:
    name: str
    wheels: tuple[Wheel, ...] = ()
    spare: Wheel | None = None
    tags: tuple[str, ...] = ()
    folder: Path = Path("/garage")
    pin: dict[str, dict[str, int]] = field(
        default_factory=dict, metadata={"key": "pin_codes", "secret": True}
    )


def test_objects_are_in_each_other() -> None:
    data = {"name": "x", "wheels": [{"size": 1}, {"size": 2, "label": None}], "tags": ["a"]}
    car = parse(Car, {**data, "spare": {"size": 3}, "pin_codes": {"a": {"b": 1}}, "folder": "/y"})
    wheels, spare = (Wheel(1), Wheel(2)), Wheel(3)
    assert car == Car("x", wheels, spare, ("a",), Path("/y"), {"a": {"b": 1}})
    assert parse(Car, {"name": "x", "spare": None}).spare is None


@pytest.mark.parametrize(
    ("data", "where", "text"),
    [
        ([{}], "", "must be an object, but is a list"),
        ({}, "", "has no name"),
        ({"name": 1}, "/name", "must be a string, but is 1"),
        (
            {"name": "x", "wheels": {"a": 1}},
            "/wheels",
            "must be a list of objects, but is an object",
        ),
        ({"name": "x", "wheels": [1]}, "/wheels/0", "must be an object, but is 1"),
        ({"name": "x", "wheels": [{}]}, "/wheels/0", "has no size"),
        ({"name": "x", "spare": {"size": 0}}, "/spare/size", "must be at least 1, but is 0"),
        ({"name": "x", "spare": {"label": 1}}, "/spare/label", "must be a string or null"),
        ({"name": "x", "folder": "y"}, "/folder", "must be an absolute path, but is 'y'"),
        ({"name": "x", "tags": ["a", None]}, "/tags/1", "must be a string, but is null"),
        ({"name": "x", "a/b": 1}, "/a~1b", "there is no such key"),
        ({"name": "x", "pin_codes": "1234"}, "/pin_codes", "must be an object, but is a string"),
        ({"name": "x", "pin_codes": {"a": 1234}}, "/pin_codes/a", "but is a whole number"),
    ],
)
def test_a_fault_has_its_place(data: Any, where: str, text: str) -> None:
    with pytest.raises(SchemaError) as caught:
        parse(Car, data)
    assert caught.value.where == where
    assert text in caught.value.text
    assert str(caught.value).startswith(f"{where}: " if where else caught.value.text)
    assert "1234" not in str(caught.value)


def test_a_key_that_is_not_known_has_a_hint() -> None:
    with pytest.raises(SchemaError, match="there is no such wheel part") as caught:
        parse(Wheel, {"sise": 1}, noun="wheel part")
    assert caught.value.hint == "did you mean size?"
