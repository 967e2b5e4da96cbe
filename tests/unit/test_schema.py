"""Objects out of people's JSON and TOML: what is taken, and what is said of each mistake."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from brine.common.schema import SchemaError, key, parse
from brine.common.settings import SettingsError, load, setting
from brine.kvmd.settings import KvmdSettings
from brine.vm import spec
from brine.vm.spec import Spec, SpecError, to_json


def fault_of_colour(text: str) -> str | None:
    return None if text in ("red", "blue") else "is no colour"


class Brake(StrEnum):
    """A closed set."""

    SHOE = "shoe"
    DISC = "disc"


@dataclass(frozen=True)
class Wheel:
    """A part of something."""

    size: int = key(minimum=10, maximum=30)
    colour: str = key("", check=fault_of_colour)
    label: str | None = None
    brake: Brake = Brake.SHOE


@dataclass(frozen=True)
class Cart:
    """A thing with each kind of key."""

    name: str = key(check=fault_of_colour)
    horses: int = key(1, minimum=0)
    open: bool = key(False)
    kind: str = key("hay", choices=("hay", "mail"))
    wheels: tuple[Wheel, ...] = ()
    spare: Wheel | None = None
    colours: tuple[str, ...] = key(("red",), check=fault_of_colour)
    flag: str = key("red", check=fault_of_colour)
    folder: Path = Path("/garage")
    pause_s: float = key(1.5, minimum=0)
    pin: dict[str, dict[str, int]] = field(
        default_factory=dict, metadata={"key": "pin_codes", "secret": True}
    )


def test_what_is_said_is_taken_and_all_else_has_its_default() -> None:
    assert parse(Cart, {"name": "red"}) == Cart(name="red")
    assert parse(Cart, {"name": "red", "spare": None, "pause_s": 2}).pause_s == 2.0
    wheels = [{"size": 10, "label": None}, {"size": 30, "colour": "red", "brake": "disc"}]
    said = {"horses": 0, "open": True, "kind": "mail", "wheels": wheels, "colours": []}
    more = {"spare": {"size": 12}, "folder": "/y", "pin_codes": {"a": {"b": 1}}}
    assert parse(Cart, {"name": "blue", **said, **more}) == Cart(
        "blue",
        horses=0,
        open=True,
        kind="mail",
        wheels=(Wheel(10), Wheel(30, "red", brake=Brake.DISC)),
        spare=Wheel(12),
        colours=(),
        folder=Path("/y"),
        pin={"a": {"b": 1}},
    )
    assert parse(Wheel, {"size": 10, "colour": ""}) == Wheel(10, "")  # which is the default


KNOWN = "known are: colours, flag, folder, horses, kind, name, open, pause_s, pin_codes, spare,"


@pytest.mark.parametrize(
    ("data", "where", "said", "hint"),
    [
        (None, "", "must be an object, but is null", ""),
        ([{}], "", "must be an object, but is a list", ""),
        ("x", "", "must be an object, but is 'x'", ""),
        ({}, "", "has no name", ""),
        ({"name": None}, "/name", "must be a string, but is null", ""),
        ({"name": 5}, "/name", "must be a string, but is 5", "put it in quotes"),
        ({"name": ""}, "/name", "is no colour", ""),  # it must be there, and so must be something
        ({"flag": ""}, "/flag", "is no colour", ""),  # as its default is something
        ({"horses": "1"}, "/horses", "must be a whole number, but is '1'", "leave out the quotes"),
        ({"horses": True}, "/horses", "must be a whole number, but is true", ""),
        ({"horses": 1.0}, "/horses", "must be a whole number, but is 1.0", ""),
        ({"horses": -1}, "/horses", "must be at least 0, but is -1", ""),
        ({"horses": "x" * 99}, "/horses", f"must be a whole number, but is '{'x' * 56}...", ""),
        ({"pause_s": float("nan")}, "/pause_s", "must be a number, but is nan", ""),
        ({"open": 1}, "/open", "must be true or false, but is 1", "true"),
        ({"open": "no"}, "/open", "must be true or false, but is 'no'", "false"),
        ({"kind": "mial"}, "/kind", "must be one of hay, mail, but is 'mial'", "did you mean mail"),
        ({"wheels": {}}, "/wheels", "must be a list of objects, but is an object", ""),
        ({"wheels": [5]}, "/wheels/0", "must be an object, but is 5", ""),
        ({"wheels": [{"size": 12}, {}]}, "/wheels/1", "has no size", ""),
        ({"wheels": [{"size": 31}]}, "/wheels/0/size", "must be at most 30, but is 31", ""),
        (
            {"wheels": [{"seize": 1}]},
            "/wheels/0/seize",
            "there is no such key",
            "did you mean size",
        ),
        ({"spare": {"size": 9}}, "/spare/size", "must be at least 10, but is 9", ""),
        ({"spare": {"label": 1}}, "/spare/label", "must be a string or null, but is 1", "quotes"),
        ({"spare": {"brake": "x"}}, "/spare/brake", "must be one of shoe, disc, but is 'x'", ""),
        ({"colours": "red"}, "/colours", "must be a list of strings, but is 'red'", ""),
        ({"colours": ["red", 1]}, "/colours/1", "must be a string, but is 1", ""),
        ({"colours": ["red", "rde"]}, "/colours/1", "is no colour", ""),
        ({"folder": "y"}, "/folder", "must be an absolute path, but is 'y'", ""),
        ({"pin_codes": "1234"}, "/pin_codes", "must be an object, but is a string", ""),
        (
            {"pin_codes": {"a": 1234}},
            "/pin_codes/a",
            "must be an object, but is a whole number",
            "",
        ),
        ({"hosres": 1}, "/hosres", "there is no such key", "did you mean horses?"),
        ({"zzz": 1}, "/zzz", "there is no such key", KNOWN),
        ({"a/b~c": 1}, "/a~1b~0c", "there is no such key", ""),
        ({"a\nb": 1}, r"/a\nb", "there is no such key", ""),
        ({"\ud800": 1}, r"/\ud800", "there is no such key", ""),
    ],
)
def test_each_mistake_is_named_with_its_place(data: Any, where: str, said: str, hint: str) -> None:
    if isinstance(data, dict) and data:
        data = {"name": "red", **data}
    with pytest.raises(SchemaError) as told:
        parse(Cart, data)
    assert told.value.where == where
    assert str(told.value) == (f"{where}: {said}" if where else said)
    assert hint in (told.value.hint or "")
    str(told.value).encode()


# Specs.


def test_a_spec_is_there_and_back_with_all_defaults() -> None:
    web1 = spec.parse(Spec, {"name": "web1", "nics": [{"link": "br0"}]})
    told = to_json(web1)
    assert told["nics"][0]["link"] == "br0"
    assert told["disks"] == []
    assert spec.parse(Spec, told) == web1


@pytest.mark.parametrize(
    ("data", "said", "hint"),
    [
        ({"nics": [{"bridge": "br0"}]}, "/nics/0/bridge: ", "did you mean link?"),
        ({"memory": 5}, "/memory: ", "did you mean memory_mib?"),
        ({"name": "x\ny"}, r"/name: has characters that can't be printed: 'x\ny'", ""),
        ({"nics": [{"ips": ["192.0.2.1/24"]}]}, "is to be without: 192.0.2.1", ""),
    ],
)
def test_what_is_wrong_with_a_spec_is_told(data: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec.parse(Spec, {"name": "web1", **data})
    assert said in str(caught.value)
    assert hint in (caught.value.hint or "")


# Settings of daemons.


@dataclass(frozen=True)
class Sample:
    name: str = "x"
    count: int = setting(3, minimum=1, maximum=9)
    level: str = setting("info", choices=("debug", "info"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sample.toml"


def test_a_settings_file_may_be_absent_unless_a_person_named_it(file: Path) -> None:
    assert load(Sample, file) == Sample()
    with pytest.raises(SettingsError, match=r"sample\.toml: there is no such file"):
        load(Sample, file, required=True)
    file.write_text("")
    assert load(Sample, file, required=True) == Sample()
    file.write_text('name="y"\ncount=9\nlevel="debug"')
    assert load(Sample, file) == Sample("y", 9, "debug")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (b"cuont = 1", "cuont: there is no such setting", "did you mean count?"),
        (b"count = '1'", "count: must be a whole number, but is '1'", ""),
        (b"count = 10", "count: must be at most 9, but is 10", ""),
        (b"level = 'inf'", "level: must be one of debug, info, but is 'inf'", "did you mean info?"),
        (b"count = ", "not valid TOML", ""),
        (b"level = info", "not valid TOML", "strings need quotes"),
        (b"count = 1\ncount = 2", "not valid TOML", ""),
        (b"name = '\xff'", "not valid UTF-8", ""),
    ],
)
def test_each_mistake_in_settings_is_named(
    file: Path, text: bytes, message: str, hint: str
) -> None:
    file.write_bytes(text)
    with pytest.raises(SettingsError) as caught:
        load(Sample, file)
    assert str(caught.value).startswith(f"{file}: {message}")
    assert "\n" not in str(caught.value)
    assert hint in (caught.value.hint or "")


def test_kvmds_defaults_are_those_of_the_design(file: Path) -> None:
    settings = load(KvmdSettings, file)
    assert settings == KvmdSettings()
    assert (settings.control_dir, settings.suffix) == (Path("/run/brine/ctrl"), ".kvmd")
    assert settings.powerdown_stale_s == 600
    with pytest.raises(SettingsError, match="can't be read: Is a directory"):
        load(KvmdSettings, file.parent)


@pytest.mark.parametrize("suffix", ["", ".", "/x", ".a/b", ".shutdown", ".stopping"])
def test_a_suffix_must_be_fit_for_a_socket(file: Path, suffix: str) -> None:
    file.write_text(f'suffix = "{suffix}"')
    with pytest.raises(SettingsError, match="suffix: "):
        load(KvmdSettings, file)
