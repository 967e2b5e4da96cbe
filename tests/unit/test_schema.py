"""Objects out of people's JSON: what is taken, and what is said of each mistake."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from brine.instance.spec import Spec, SpecError, key, parse, to_json


def fault_of_colour(text: str) -> str | None:
    return None if text in ("red", "blue") else "is no colour"


@dataclass(frozen=True)
class Wheel:
    """A part of something."""

    size: int = key(minimum=10, maximum=30)
    colour: str = key("", check=fault_of_colour)


@dataclass(frozen=True)
class Cart:
    """A thing with each kind of key."""

    name: str = key(check=fault_of_colour)
    horses: int = key(1, minimum=0)
    open: bool = key(False)
    kind: str = key("hay", choices=("hay", "mail"))
    wheels: tuple[Wheel, ...] = key(())
    colours: tuple[str, ...] = key(("red",), check=fault_of_colour)
    flag: str = key("red", check=fault_of_colour)


def test_what_is_left_out_has_its_default() -> None:
    assert parse(Cart, {"name": "red"}) == Cart(name="red")
    assert Cart(name="red").colours == ("red",)


def test_what_is_said_is_taken() -> None:
    said = {
        "name": "blue",
        "horses": 0,
        "open": True,
        "kind": "mail",
        "wheels": [{"size": 10}, {"size": 30, "colour": "red"}],
        "colours": [],
        "flag": "blue",
    }
    wheels = (Wheel(10), Wheel(30, "red"))
    assert parse(Cart, said) == Cart("blue", 0, True, "mail", wheels, (), "blue")


def test_there_and_back_with_all_defaults() -> None:
    cart = parse(Cart, {"name": "red", "wheels": [{"size": 12}]})
    told = to_json(cart)
    assert told["wheels"] == [{"size": 12, "colour": ""}]
    assert told["colours"] == ["red"]
    assert parse(Cart, told) == cart


@pytest.mark.parametrize(
    ("data", "where", "said"),
    [
        (None, "", "must be an object, but is null"),
        ([], "", "must be an object, but is a list"),
        ("x", "", "must be an object, but is 'x'"),
        ({}, "", "has no name"),
        ({"name": None}, "/name", "must be a string, but is null"),
        ({"name": 5}, "/name", "must be a string, but is 5"),
        ({"name": {}}, "/name", "must be a string, but is an object"),
        ({"horses": "1"}, "/horses", "must be a whole number, but is '1'"),
        ({"horses": True}, "/horses", "must be a whole number, but is True"),
        ({"horses": 1.0}, "/horses", "must be a whole number, but is 1.0"),
        ({"horses": -1}, "/horses", "must be at least 0, but is -1"),
        ({"open": 1}, "/open", "must be true or false, but is 1"),
        ({"open": "yes"}, "/open", "must be true or false, but is 'yes'"),
        ({"kind": "mial"}, "/kind", "must be one of hay, mail, but is 'mial'"),
        ({"kind": ""}, "/kind", "must be one of hay, mail, but is ''"),
        ({"wheels": {}}, "/wheels", "must be a list of objects, but is an object"),
        ({"wheels": [5]}, "/wheels/0", "must be an object, but is 5"),
        ({"wheels": [{"size": 9}]}, "/wheels/0/size", "must be at least 10, but is 9"),
        ({"wheels": [{"size": 12}, {}]}, "/wheels/1", "has no size"),
        ({"wheels": [{"size": 31}]}, "/wheels/0/size", "must be at most 30, but is 31"),
        ({"colours": "red"}, "/colours", "must be a list of strings, but is 'red'"),
        ({"colours": ["red", 1]}, "/colours/1", "must be a string, but is 1"),
        ({"colours": ["red", "rde"]}, "/colours/1", "is no colour"),
        ({"name": "x\ny"}, "/name", r"has characters that can't be printed: 'x\ny'"),
        ({"name": "x" * 99}, "/name", "is no colour"),
        ({"horses": "x" * 99}, "/horses", f"must be a whole number, but is '{'x' * 56}..."),
    ],
)
def test_each_mistake_is_named_with_its_place(data: Any, where: str, said: str) -> None:
    if isinstance(data, dict) and data:
        data = {"name": "red", **data}
    with pytest.raises(SpecError) as told:
        parse(Cart, data)
    assert told.value.where == where
    assert str(told.value) == (f"{where}: {said}" if where else said)


@pytest.mark.parametrize(
    ("data", "where", "hint"),
    [
        ({"hosres": 1}, "/hosres", "did you mean horses?"),
        ({"zzz": 1}, "/zzz", "known are: colours, flag, horses, kind, name, open, wheels"),
        ({"wheels": [{"seize": 1}]}, "/wheels/0/seize", "did you mean size?"),
        ({"kind": "mial"}, "/kind", "did you mean mail?"),
    ],
)
def test_the_nearest_known_one_is_told(data: Any, where: str, hint: str) -> None:
    with pytest.raises(SpecError) as told:
        parse(Cart, {"name": "red", **data})
    assert (told.value.where, told.value.hint) == (where, hint)


@pytest.mark.parametrize(
    "data",
    [
        {"name": ""},  # which has to be there, and so has to be something
        {"name": "red", "flag": ""},  # whose default is something
        {"name": "red", "colours": [""]},
    ],
)
def test_nothing_is_checked_too_where_it_is_no_choice(data: Any) -> None:
    with pytest.raises(SpecError, match="is no colour"):
        parse(Cart, data)


def test_nothing_is_left_alone_where_it_is_the_default() -> None:
    assert parse(Wheel, {"size": 10, "colour": ""}) == Wheel(10, "")


@pytest.mark.parametrize(
    ("name", "where"), [("a\nb", r"/a\nb"), ("a/b~c", "/a~1b~0c"), ("\ud800", r"/\ud800")]
)
def test_an_odd_key_is_told_in_one_line_that_can_be_written(name: str, where: str) -> None:
    with pytest.raises(SpecError) as told:
        parse(Cart, {"name": "red", name: 1})
    assert str(told.value) == f"{where}: there is no such key"
    str(told.value).encode()


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        ({"nics": [{"bridge": "br0"}]}, "did you mean link?"),
        ({"memory": 5}, "did you mean memory_mib?"),
        ({"nics": [{"link": 5}]}, 'put it in quotes: "5"'),
        ({"vcpus": "2"}, "leave out the quotes: 2"),
        ({"acpi": "no"}, "false"),
    ],
)
def test_what_somebody_may_have_meant_is_a_hint(data: dict[str, Any], hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(Spec, {"name": "web1", **data})
    assert caught.value.hint == hint


def test_an_address_with_a_length_is_told_so() -> None:
    with pytest.raises(SpecError, match="is to be without: 192.0.2.1"):
        parse(Spec, {"name": "web1", "nics": [{"ips": ["192.0.2.1/24"]}]})
