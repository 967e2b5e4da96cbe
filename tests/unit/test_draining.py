"""Where instances go when nodes are emptied and filled: the plan, and its record."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brine.cluster.draining import (
    PlacementError,
    Plan,
    Room,
    Tenant,
    at_home,
    drain_plan,
    fill_plan,
    plan,
    with_drained,
    with_home,
    with_undrained,
    without_home,
    without_mark,
)
from brine.config.model import Configuration, Node
from lab.ganeti_config import ganeti_config, instance_name, node_name, uuid_of

_MEMORY = {"memory_available_mib": 8000, "units": {"vg": {"free_mib": 5000, "allocatable": True}}}


@pytest.fixture
def configuration() -> Configuration:
    """Three nodes, of which the first is the master; six instances, two on each."""
    return Configuration.from_json(ganeti_config(nodes=3, instances=6))


def row(number: int, *, memory_mib: int = 512, oper: str = "running", **more: Any) -> Any:
    volumes = [{"unit": "vg", "made": 10 << 20}]
    names = {"name": instance_name(number), "uuid": uuid_of("instance", number)}
    return {**names, "memory_mib": memory_mib, "oper_state": oper, "volumes": volumes, **more}


def facts(configuration: Configuration) -> dict[str, Any]:
    return {one.name: _MEMORY for one in configuration.nodes.values()}


def where(found: Plan) -> dict[str, str]:
    return {one.instance: one.target for one in found.moves}


def moved(configuration: Configuration, number: int, node: int) -> Configuration:
    """As after a move."""
    data = configuration.to_json()
    data["instances"][uuid_of("instance", number)]["primary_node"] = uuid_of("node", node)
    return Configuration.from_json(data)


def guest(name: str, memory_mib: int, **more: Any) -> Tenant:
    return Tenant(name=name, uuid=name, node="n1", memory_mib=memory_mib, **more)


def place(node: str, memory_mib: int, **units: int) -> Room:
    return Room(node=node, memory_mib=memory_mib, units=units)


def test_guests_spread_over_the_free_memory_the_largest_first() -> None:
    guests = [guest("a", 500), guest("b", 3000), guest("c", 1000)]
    found = plan(guests, [place("n2", 4000), place("n3", 3900)], jobs=2)
    assert where(found) == {"b": "n2", "c": "n3", "a": "n3"}
    assert [one.wave for one in found.moves] == [0, 0, 1]


def test_guests_are_packed_where_they_would_not_fit_otherwise() -> None:
    guests = [guest("a", 1000), guest("b", 1000), guest("c", 3000)]
    places = [place("n2", 3200), place("n3", 2300)]
    assert where(plan(guests, places)) == {"c": "n2", "a": "n3", "b": "n3"}
    guests = [guest("a", 2000), guest("b", 3000)]  # spread, a would take what b needs
    places = [place("n2", 3500), place("n3", 2200)]
    assert plan(guests, places).is_whole()


def test_a_guest_without_a_place_stays_with_the_reason_of_each_node() -> None:
    guests = [guest("a", 9000), guest("b", 10, units={"vg": 70}), guest("c", 10)]
    places = [place("n2", 4000, vg=50), place("n3", 4000), Room(node="n4", why_not="no answer")]
    barred = {"c": {"n2": "another processor", "*": "it has a device of its node"}}
    found = plan(guests, places, barred=barred)
    reasons = {one.instance: one.why for one in found.stays}
    assert found.moves == ()
    assert not found.is_whole()
    assert "4000" in reasons["a"]
    assert "9244" in reasons["a"]
    assert "n2: vg has 50" in reasons["b"]
    assert "n3: it has no storage unit vg" in reasons["b"]
    assert "n4: no answer" in reasons["b"]
    assert "n2: another processor" in reasons["c"]
    assert "n3: it has a device" in reasons["c"]


@given(
    st.lists(st.integers(1, 4000), max_size=12),
    st.lists(st.integers(0, 9000), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_no_node_gets_more_than_it_has(sizes: list[int], free: list[int], jobs: int) -> None:
    guests = [guest(f"g{number}", size) for number, size in enumerate(sizes)]
    found = plan(guests, [place(f"p{number}", one) for number, one in enumerate(free)], jobs=jobs)
    names = [one.instance for one in found.moves] + [one.instance for one in found.stays]
    assert sorted(names) == sorted(one.name for one in guests)
    for number, one in enumerate(free):
        taken = sum(move.memory_mib for move in found.moves if move.target == f"p{number}")
        assert taken + found.left[f"p{number}"] == one
        assert found.left[f"p{number}"] >= 0
    waves = [one.wave for one in found.moves]
    assert all(waves.count(wave) <= jobs for wave in waves)


def test_a_drain_moves_what_runs_to_nodes_that_take_it(configuration: Configuration) -> None:
    first, second, third = map(node_name, (1, 2, 3))
    rows = {second: [row(2), row(5, oper="down"), row(1), row(99)]}
    found = drain_plan(configuration, rows, facts(configuration))
    assert where(found) == {instance_name(2): first}
    reasons = {one.instance: (one.why, one.is_fault) for one in found.stays}
    assert reasons[instance_name(5)] == ("it does not run", False)
    assert first in reasons[instance_name(1)][0]  # it is there, as far as is known
    assert reasons[instance_name(99)][1]
    drained = with_drained(configuration, first.upper(), []), with_drained(configuration, third, [])
    assert drain_plan(drained[0], rows, facts(configuration)).moves  # the master takes instances
    silent = {first: "has not answered"}
    found = drain_plan(drained[1], rows, silent)
    assert f"{first}: its facts are not known: has not answered" in found.stays[0].why


def test_a_drain_is_refused_where_nodes_are_unknown(configuration: Configuration) -> None:
    second, third = map(node_name, (2, 3))
    with pytest.raises(PlacementError, match=second):
        drain_plan(configuration, {second: "has not answered"}, {})
    drained = with_drained(configuration, third, [])
    for to in third, second:
        with pytest.raises(PlacementError, match=to):
            drain_plan(drained, {second: [row(2)]}, facts(configuration), to=to)


def node_of(configuration: Configuration, number: int) -> Node:
    return configuration.nodes[uuid_of("node", number)]


def test_what_a_drain_has_moved_away_comes_home(configuration: Configuration) -> None:
    second, third = map(node_name, (2, 3))
    was_candidate = node_of(configuration, 2).master_candidate
    uuids = [uuid_of("instance", number) for number in (2, 5)]
    drained = with_drained(configuration, second, uuids)
    assert node_of(drained, 2).drained
    assert not node_of(drained, 2).master_candidate
    drained = with_drained(drained, second, uuids[:1])  # it was interrupted, and goes on
    assert at_home(drained, second) == uuids
    away = moved(drained, 2, 3)
    filled = without_mark(away, second)
    assert not node_of(filled, 2).drained
    assert node_of(filled, 2).master_candidate == was_candidate
    rows = {third: [row(2, memory_mib=100), row(3)]}
    assert where(fill_plan(filled, [second], rows, facts(filled))) == {instance_name(2): second}
    assert at_home(with_home(filled, second), second) == uuids[:1]
    # One whose move away is pending may be away by its end.
    both = with_home(moved(filled, 2, 2), second, {uuids[1]})
    assert at_home(both, second) == uuids[1:]
    home = with_home(moved(filled, 2, 2), second)
    assert at_home(home, second) == []
    assert node_of(home, 2) == node_of(configuration, 2)


def test_a_drain_after_an_undrain_forgets_what_a_former_one_has_moved(
    configuration: Configuration,
) -> None:
    second = node_name(2)
    former = with_undrained(with_drained(configuration, second, ["gone"]), second)
    assert at_home(former, second) == ["gone"]  # a fill would bring it home
    later = with_drained(former, second, ["new"])
    assert at_home(later, second) == ["new"]
    assert at_home(with_drained(later, second, ["newer"]), second) == ["new", "newer"]
    moved_for_itself = without_home(former, "gone")
    assert node_of(moved_for_itself, 2) == node_of(configuration, 2)
    nothing = with_undrained(configuration, second)
    assert node_of(nothing, 2) == node_of(configuration, 2)


@pytest.mark.parametrize("number", [1, 2], ids=["master", "node"])
def test_a_drain_after_a_fill_knows_what_that_has_not_brought_home(
    configuration: Configuration, number: int
) -> None:
    name = node_name(number)
    uuids = [uuid_of("instance", one) for one in (2, 5, 3)]
    away = configuration
    for one in (2, 5, 3):
        away = moved(away, one, 3 - number)  # not to the third node, which is not filled
    drained = with_drained(away, name, uuids)
    killed = without_mark(drained, name)  # before the fill has moved one
    assert at_home(with_drained(killed, name, []), name) == uuids
    killed = without_mark(moved(drained, 5, number), name)  # before the fill has noted its end
    assert [*at_home(with_drained(killed, name, []), name)] == uuids
    filled = with_home(without_mark(moved(drained, 5, number), name), name)
    later = with_drained(filled, name, ["new"])
    assert at_home(later, name) == [uuids[0], uuids[2], "new"]
    undrained = with_undrained(filled, name)  # a person leaves them where they are
    assert at_home(with_drained(undrained, name, ["new"]), name) == ["new"]


def test_the_master_is_emptied_and_stays_the_master(configuration: Configuration) -> None:
    uuids = [uuid_of("instance", 1)]
    drained = with_drained(configuration, node_name(1), uuids)
    assert not node_of(drained, 1).drained
    assert node_of(drained, 1).master_candidate
    assert at_home(drained, node_name(1)) == uuids


def test_memory_that_guests_have_not_touched_yet_is_not_free(configuration: Configuration) -> None:
    first, second, third = map(node_name, (1, 2, 3))
    known = {one: _MEMORY | {"memory_mib": 8000} for one in (first, second, third)}
    full = [row(1, memory_mib=7800), row(4, memory_mib=9000, oper="down")]
    others = {first: full, third: [row(3)]}
    found = drain_plan(configuration, {second: [row(2)]}, known, others=others)
    assert where(found) == {instance_name(2): third}
    away = moved(with_drained(configuration, second, [uuid_of("instance", 2)]), 2, 3)
    found = fill_plan(away, [second], {third: [row(2)], second: full}, known)
    assert found.moves == ()
    assert "MiB of memory are left" in found.stays[0].why
