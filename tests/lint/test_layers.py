"""The parts of Brine import downwards, and use each other's public names only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

import pytest

from lab.house import circles, imports_of, modules_of
from lab.tree import TREE

PKGS = TREE / "pkgs"

BELOW = {
    "common": set(),
    "vm": {"common"},
    "storage": {"common", "vm"},
    "config": {"common", "vm"},
    "cluster": {"common", "config"},
    "kvmd": {"common", "vm"},
    "confd": {"common", "config"},
    "hotplug": {"common", "vm"},
    "instance": {"common", "vm", "config", "hotplug", "storage"},
    "lifecycle": {"common", "vm", "instance"},
    "moves": {"common", "vm", "config", "confd", "instance", "storage", "hotplug"},
    "watcher": {"common", "vm", "instance", "hotplug"},
}
"""The parts that a part may import, beside itself."""


MODULES = {module.name: module.tree for module in modules_of()}
"""The syntax trees of all modules."""


def imports(nodes: ast.AST) -> Iterator[tuple[str, str]]:
    """The modules of Brine that a tree imports, and the names that it takes of each."""
    for node in ast.walk(nodes):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("brine"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in MODULES:
                    yield whole, ""
                else:
                    yield node.module or "", alias.name
        elif isinstance(node, ast.Import):
            yield from ((one.name, "") for one in node.names if one.name.startswith("brine."))


def test_all_parts_are_known() -> None:
    assert {folder.name for folder in PKGS.iterdir() if folder.is_dir()} == BELOW.keys()


def test_no_part_is_below_that_must_never_be() -> None:
    """Whatever else the table gets: what every part stands on knows none of them, and nothing
    stands on a daemon, nor on what watches over instances."""
    assert BELOW["common"] == set()
    assert BELOW["vm"] == {"common"}
    assert not {"instance", "hotplug"} & BELOW["config"]
    assert not {"instance", "config"} & BELOW["hotplug"]
    on_top = {"cluster", "confd", "kvmd", "lifecycle", "moves", "watcher"}
    # Moves use the client of confd alone, which the next test holds.
    assert {part: found for part, below in BELOW.items() if (found := below & on_top)} == {
        "moves": {"confd"}
    }


def test_moves_use_the_client_of_confd_alone() -> None:
    theirs = {
        other
        for module in MODULES
        if module.split(".")[1] == "moves"
        for other, _ in imports(MODULES[module])
        if other.startswith("brine.confd.")
    }
    client = {"client", "keys", "protocol", "questions", "settings"}
    assert {one.rpartition(".")[2] for one in theirs} <= client


@pytest.mark.parametrize("part", sorted(BELOW))
def test_imports_point_down(part: str) -> None:
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if module.split(".")[1] == part
        for other, _ in imports(MODULES[module])
        if other.split(".")[1] not in BELOW[part] | {part}
    ]
    assert wrong == []


def test_salts_side_imports_nothing_of_brine() -> None:
    """Salt's own packages have another Python, which has neither Brine nor Debian's modules."""
    files = sorted((TREE / "salt/states").rglob("*.py"))
    assert files
    wrong = [
        f"{file} imports {name}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        for name in _imported(node)
        if name.partition(".")[0] not in {"salt", *sys.stdlib_module_names}
    ]
    assert wrong == []


def _imported(node: ast.AST) -> list[str]:
    """The modules that a statement imports."""
    if isinstance(node, ast.ImportFrom):
        return [node.module or "."]
    return [one.name for one in node.names] if isinstance(node, ast.Import) else []


def test_no_private_name_leaves_its_module() -> None:
    wrong = [
        f"{module} takes {name} of {other}"
        for module in MODULES
        for other, name in imports(MODULES[module])
        if name.startswith("_") and not name.startswith("__")
    ]
    assert wrong == []


def test_marker_files_have_one_reader() -> None:
    """All ask brine.vm.run.Run about markers."""
    readers = {
        module
        for module in MODULES
        for node in ast.walk(MODULES[module])
        if (isinstance(node, ast.Attribute) and node.attr == "read_marker")
        or (isinstance(node, ast.Name) and node.id == "read_marker")
    }
    assert readers == {"brine.vm.run"}


def test_no_modules_import_each_other() -> None:
    """Nor in a circle of several, those imports counted too that stand in functions or are for
    types only."""
    assert circles(imports_of(modules_of())) == []


def test_a_class_name_exists_once() -> None:
    places: dict[str, list[str]] = {}
    for module in MODULES:
        for node in ast.walk(MODULES[module]):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


LATE = {
    "asyncio": "brine-lifecycle does without",
    "brine.common.cli": "until it is loaded, SIGINT ends the process",
    "brine.common.ending": "as that",
    "brine.common.journal": "with it logging; most starts have nothing to say",
    "brine.common.qmp.client": "most starts ask no QEMU",
    "brine.config.ssconf": "only instances with a user of their own take one",
    "brine.hotplug.net.records": "with it netlink, of which disks need none",
    "brine.hotplug.net.wiring": "as that, and most ends leave no tap",
    "brine.hotplug.plug_nic": "as that",
    "brine.instance.disks.states": "with it all of storage, and most disks have no volume",
    "brine.instance.kvm.runtime_devices": "only a start that drops devices needs it",
    "brine.instance.kvm.guest": "an instance has one of the two",
    "brine.instance.kvm.resources": "only a start needs all that makes a QEMU",
    "brine.instance.settings": "with it a reader of TOML",
    "brine.instance.validate": "most specs have nothing pending",
    "brine.instance.xen.xl": "most nodes have no Xen",
    "brine.instance.xen.domain": "an instance has one of the two",
    "difflib": "only a mistake needs it",
    "ipaddress": "most specs have no address",
    "logging": "most starts have nothing to say",
    "pyroute2": "it takes longer to load than all else together",
    "subprocess": "most commands start no program",
    "systemd": "the journal is asked about few instances",
    "tempfile": "commands that only read need none",
    "uuid": "with it platform; most starts plug nothing",
    "yaml": "most specs are JSON",
}
"""Imports within functions, and why: each start of an instance, or each list, would wait
for it. All else is imported at the top of a file."""


def imported_late() -> Iterator[tuple[str, str]]:
    """The modules with imports in functions, and what they import there."""
    for module in MODULES:
        for function in ast.walk(MODULES[module]):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    yield from ((module, one.name) for one in node.names)
                elif isinstance(node, ast.ImportFrom):
                    for one in node.names:
                        whole = f"{node.module}.{one.name}"
                        yield module, whole if whole in MODULES else str(node.module)


def test_imports_stand_at_the_top() -> None:
    late = {
        name if name.startswith("brine.") else name.partition(".")[0] for _, name in imported_late()
    }
    assert late == LATE.keys()
    assert len(LATE) <= 26
