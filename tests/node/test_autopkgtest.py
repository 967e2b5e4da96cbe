"""The tests of debian/tests, which autopkgtest(1) runs for Debian, as it would run them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.node import Node, boot_node
from lab.repository import publish
from lab.tree import TREE

SOURCE = "/srv/source"


def declared_tests() -> dict[str, dict[str, str]]:
    """The fields of each test in debian/tests/control, by its name."""
    text = re.sub(r"^#.*\n", "", (TREE / "debian/tests/control").read_text(), flags=re.MULTILINE)
    paragraphs = [
        dict(line.split(": ", 1) for line in paragraph.splitlines())
        for paragraph in text.strip().split("\n\n")
    ]
    return {paragraph["Tests"]: paragraph for paragraph in paragraphs}


TESTS = declared_tests()


@pytest.fixture(scope="module")
def testbed(release: str, packages: list[Path]) -> Iterator[Node]:
    """A container with systemd, which is what the tests ask for, and a source package."""
    with boot_node(release) as node:
        publish(node, packages)
        node.put(TREE / "debian/tests", f"{SOURCE}/debian/tests")
        yield node


def test_each_part_that_has_units_has_a_test() -> None:
    assert {path.parts[-3] for path in TREE.glob("pkgs/*/system/*.service")} <= set(TESTS)


@pytest.mark.parametrize("name", TESTS)
def test_the_packages_own_test_passes(testbed: Node, name: str) -> None:
    test = TESTS[name]
    assert set(test["Restrictions"].split(", ")) == {"isolation-container", "needs-root"}
    install = ["apt-get", "install", "--yes", "--quiet=2", *test["Depends"].split(", ")]
    testbed.run(["env", "DEBIAN_FRONTEND=noninteractive", *install], timeout_s=300)
    testbed.shell(
        f"cd {SOURCE}; AUTOPKGTEST_TMP=$(mktemp -d) debian/tests/{name} 2>&1", timeout_s=400
    )
