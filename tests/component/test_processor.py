"""What this host's real QEMU can give guests: its answers, and programs that are none or hang."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brine.cluster.cpu_baseline import baseline, nodes_of
from brine.common import cli, paths
from brine.common.entry_points import EntryPoint
from brine.instance.kvm import processor
from brine.instance.kvm.processor import (
    Processor,
    ProcessorError,
    known_processor_of,
    processor_of,
)
from brine.instance.node_facts import NodeFacts
from brine.vm.spec import WHOLE_CPUS
from lab.brine_command import prefix
from lab.machine import Host
from lab.waiting import wait_for

QEMU = "/usr/bin/qemu-system-x86_64"

_ASK = (
    "import sys; from brine.instance.kvm.processor import processor_of; processor_of(sys.argv[1])"
)


@pytest.fixture(params=["kvm", "tcg"])
def accel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways that a guest can have a processor, where this host has both."""
    if request.param == "tcg":
        monkeypatch.setattr(processor, "KVM_DEVICE", Path("/nonexistent"))
    elif not processor.KVM_DEVICE.exists():
        pytest.skip("this host has no KVM")
    return str(request.param)


def starts(accel: str, cpu: str, *, enforces: bool = True) -> subprocess.CompletedProcess[str]:
    """Start a QEMU without a guest, which refuses a processor that is not whole."""
    hello = '{"execute": "qmp_capabilities"}{"execute": "quit"}'
    machine = [
        "-machine",
        "q35",
        "-accel",
        accel,
        "-cpu",
        f"{cpu}{',enforce' if enforces else ''}",
        "-m",
        "16",
    ]
    command = [QEMU, *machine, "-nodefaults", "-display", "none", "-S", "-qmp", "stdio"]
    return subprocess.run(
        command, input=hello, capture_output=True, text=True, timeout=120, check=False
    )


def test_qemu_starts_with_what_it_says_to_have(accel: str) -> None:
    """The whole processor, each model that lacks nothing, and the baseline of this node alone."""
    if starts(accel, WHOLE_CPUS[accel], enforces=False).returncode < 0:  # QEMU itself aborts
        pytest.skip("the KVM of this host gives its processor to no guest")
    found = processor_of(QEMU)
    assert found.accel == accel
    assert {"sse2", "lm"} <= {*found.flags}
    whole = [name for name, one in found.models.items() if one.flags and not one.missing]
    common = baseline(nodes_of({"n1": json.loads(json.dumps(found.to_json()))}))
    assert {*common.flags} == {*found.flags} - {*common.nested}
    # A KVM within a KVM may lack something of each model.
    for cpu in (WHOLE_CPUS[accel], *whole[:1], common.cpu_type):
        done = starts(accel, cpu)
        assert done.returncode == 0, f"{cpu}: {done.stderr}"


def test_a_model_that_lacks_something_is_refused_by_qemu_too(accel: str) -> None:
    found = processor_of(QEMU)
    (name, one) = next((name, one) for name, one in found.models.items() if one.missing)
    done = starts(accel, name)
    assert done.returncode != 0
    assert one.missing[0] in done.stderr


def test_the_answer_is_read_again_and_leaves_nothing_open(accel: str) -> None:
    before = os.listdir("/proc/self/fd")
    found = processor_of(QEMU)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert Processor.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert "q35" in found.machines
    assert any(one.startswith("pc-q35-") for one in found.machines)


def test_the_answer_is_noted_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, kernels = tmp_path / "processor.json", tmp_path / "cpuinfo"
    monkeypatch.setattr(paths, "PROCESSOR_FILE", noted)
    monkeypatch.setattr(processor, "PROCESSORS_FILE", kernels)
    kernels.write_text("flags : sse2\ncpu MHz : 1000.0\n")
    assert known_processor_of(QEMU) == processor_of(QEMU)
    data = json.loads(noted.read_bytes())
    data["processor"]["vendor"] = "Noted"
    noted.write_text(json.dumps(data))
    kernels.write_text("flags : sse2\ncpu MHz : 2000.0\n")
    assert known_processor_of(QEMU).vendor == "Noted"
    # A kernel with other microcode may leave a flag out.
    kernels.write_text("flags : sse2 avx\ncpu MHz : 2000.0\n")
    assert known_processor_of(QEMU).vendor != "Noted"
    noted.write_text('{"of": ')
    assert known_processor_of(QEMU).vendor != "Noted"


def program(folder: Path, *lines: str) -> Path:
    """A QEMU of our own, in Python: ``say()`` writes a line to its monitor, ``hear()`` has one."""
    begin = [
        "#!/usr/bin/python3",
        "import os, re, socket, sys, time",
        "monitor = socket.socket(fileno=int(re.search(r'fd=(\\d+)', ' '.join(sys.argv))[1]))",
        "say = lambda line: monitor.sendall(line.encode() + b'\\n')",
        "hear = lambda: monitor.recv(65536)",
        "greet = lambda: say('{\"QMP\": {}}')",
    ]
    file = folder / "qemu"
    file.write_text("\n".join([*begin, *lines, ""]))
    file.chmod(0o755)
    return file


ANSWER = "import json; say(json.dumps({{'{}': {}, 'id': json.loads(hear())['id']}}))"
"""Answers a command: with ``return`` or ``error``, and what."""


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["sys.exit(3)"], "closed the connection"),
        (["sys.exit('no such machine')"], "no such machine"),
        (["say('garbage')", "hear()"], "garbage"),
        (["say('[]')"], "not a JSON object"),
        (["greet()", ANSWER.format("error", {"class": "X", "desc": "no"})], "no"),
        (["greet()", *[ANSWER.format("return", 7)] * 2], "nothing of use"),
        (["greet()", *[ANSWER.format("return", {})] * 2], "nothing of use"),
        (["greet()", ANSWER.format("return", {}), "hear()"], "closed the connection"),
    ],
)
def test_what_is_no_qemu_is_an_error_in_one_line(
    tmp_path: Path, lines: list[str], told: str
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProcessorError) as refused:
        processor_of(str(program(tmp_path, *lines)))
    assert told in str(refused.value)
    assert str(refused.value).isprintable()
    del refused  # its frames hold the pipes of the program
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_program_that_is_not_there_can_be_installed(tmp_path: Path) -> None:
    with pytest.raises(ProcessorError) as refused:
        processor_of(str(tmp_path / "none"))
    assert "qemu-system-x86" in (refused.value.hint or "")


def test_a_program_of_another_user_is_not_run(tmp_path: Path) -> None:
    file = program(tmp_path, f"open('{tmp_path}/ran', 'w')")
    file.chmod(0o777)
    with pytest.raises(ProcessorError, match="is not run"):
        processor_of(str(file))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_qemu_that_hangs_ends_with_the_command(tmp_path: Path, number: signal.Signals) -> None:
    hangs = "os.execlp('sleep', 'sleep', '1000')"
    _, path, python, *_ = prefix(Host())
    asking = subprocess.Popen(["env", path, python, "-P", "-c", _ASK, program(tmp_path, hangs)])
    children = Path(f"/proc/{asking.pid}/task/{asking.pid}/children")

    def asked() -> Path | None:
        """The program, once it is no other any more."""
        found = [Path("/proc", pid) for pid in children.read_text().split()]
        return next((one for one in found if (one / "comm").read_text() == "sleep\n"), None)

    try:
        qemu = wait_for("the program's start", asked, timeout_s=120)
        asking.send_signal(number)
        assert asking.wait(60) != 0
        wait_for("the program's end", lambda: not qemu.exists(), timeout_s=120)
    finally:
        asking.kill()
        asking.wait()


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs ``brine node ... --json``; returns what it printed, and its exit status."""
    verbs = EntryPoint("node", "brine.instance.node_cli:add_node_verbs")
    known = {"brine.verbs": [verbs]}
    monkeypatch.setattr(cli, "entry_points", lambda group: known.get(group, []))

    def run(*arguments: str, stdin: Any = None) -> tuple[Any, int]:
        given = json.dumps(stdin).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        status = cli.main(["node", *arguments, "--json"])
        return json.loads(capsys.readouterr().out), status

    return run


def test_a_program_is_told_what_the_node_can_give(node: Any) -> None:
    cpu, status = node("cpu")
    assert status == 0
    assert baseline(nodes_of({"n1": cpu})).accel == cpu["accel"]
    facts, _ = node("facts")  # a kind of units may not be known here
    found = NodeFacts.from_json(facts)
    assert found.cpu == Processor.from_json(cpu)
    assert 0 < found.memory_available_mib <= found.memory_mib
    assert found.unfit == ()


def test_what_another_nodes_instance_would_lack_here(node: Any) -> None:
    spec = {"name": "web1", "cdroms": ["/nonexistent.iso"], "vnc_bind": "192.0.2.77"}
    facts, _ = node("facts", "--spec", "-", stdin={**spec, "accel": "tcg", "newer": 1})
    first, second = facts["unfit"]
    assert "/nonexistent.iso" in first
    assert "192.0.2.77" in second
    facts, _ = node("facts", "--spec", "-", stdin={"name": "web1", "accel": "tcg"})
    assert facts["unfit"] == []
    facts, _ = node("facts", "--spec", "-", stdin={"name": "web1", "qemu": "/nonexistent"})
    assert facts["cpu"] is None
    assert "/nonexistent" in facts["cpu_fault"]
    assert "/nonexistent" in facts["unfit"][0]
    facts, _ = node("facts", "--spec", "-", stdin={"name": "web1", "hypervisor": "xen-pvh"})
    assert (facts["cpu"], facts["cpu_fault"]) == (None, "")
    assert facts["unfit"][0] == "Xen does not run"


@pytest.mark.parametrize("arguments", [["cpu", "--qemu", "qemu"], ["facts", "--spec", "-"]])
def test_a_mistake_is_one_line(
    node: Any, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        node(*arguments, stdin=[])
    assert end.value.code in (1, 2)
    assert capsys.readouterr().err.startswith("brine: error: ")
