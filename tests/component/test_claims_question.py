"""The question of a booting node, to a real confd: whose are the instances that it has?"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from brine.common import own_node, paths
from brine.common.locks import LockedError, node_lock
from brine.confd.client import AnswerError, ConfdClient, NoAnswerError
from brine.confd.protocol import ErrorCode, RequestType
from brine.config.model import Configuration
from brine.instance import store
from brine.instance.claims import KnownClaims
from brine.instance.from_config import claim_of
from brine.instance.observe import look
from brine.instance.start import start_instance
from brine.instance.store import InstanceError
from brine.instance.validate import completed
from brine.moves import question
from brine.moves.asking import AskedResult, ask, ask_whose
from brine.moves.settings import MovesSettings, settings_or_defaults
from brine.vm.claim import Claim
from component.confd_process import SECRET, Confd, confd_process
from lab.ganeti_config import ganeti_config, instance_name, node_name, uuid_of
from lab.scripted_systemctl import ScriptedSystemctl

SHARED = "/dev/rbd-of-no-node"
HERE = node_name(1)


class BootingNode:
    """A node of a cluster of three, with instance 1, which is its own, and 2, which is not; each
    is known here by serial 3."""

    def __init__(self, confd: Confd, systemctl: ScriptedSystemctl) -> None:
        self.confd = confd
        self.systemctl = systemctl
        self.configuration = ganeti_config(nodes=3, instances=3)
        for number in (1, 2):
            self.configure(number, node=1, serial=3)
            spec = completed(
                {
                    "name": instance_name(number),
                    "uuid": uuid_of("instance", number),
                    "node": HERE,
                    "claim_serial": 3,
                    "admin_state": "up",
                    "disks": [{"path": SHARED}] * (number == 1),
                }
            )
            store.save(spec)
        own_node.note_node(uuid_of("node", 1), HERE)
        paths.UNASKED_FILE.touch()  # as the boot makes it

    def configure(self, number: int, *, node: int, serial: int) -> None:
        """Have the configuration give an instance to a node."""
        self.configuration["instances"][uuid_of("instance", number)] |= {
            "primary_node": uuid_of("node", node),
            "serial_no": serial,
        }
        for one in (self.configuration, self.configuration["cluster"]):
            one["serial_no"] += 1

    def answers(self) -> None:
        """Have the candidate answer from now on."""
        self.confd.write_config(self.configuration)
        self.confd.start()

    def ask(self, *, boots: bool = False, **settings: Any) -> AskedResult:
        return ask_whose(MovesSettings(**{"ask_timeout": 1, **settings}), boots=boots)

    def boot(self, **settings: Any) -> AskedResult:
        """Ask for the first time since the boot."""
        paths.UNASKED_FILE.unlink()
        return self.ask(boots=True, **settings)

    def change(self, number: int, **keys: Any) -> None:
        """Have the spec of an instance say something else."""
        store.save(replace(store.load(instance_name(number)), **keys))

    def barred(self) -> list[int]:
        """The numbers of the instances that may not start."""
        known = KnownClaims()
        return [n for n in (1, 2) if known.bar_to(store.load(instance_name(n)))]


@pytest.fixture
def node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_of_own: Path
) -> Iterator[BootingNode]:
    systemctl = ScriptedSystemctl(tmp_path / "systemctl", monkeypatch)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=HERE))
    # The only candidate that it can reach is on this machine, too.
    monkeypatch.setattr(question, "is_own_address", lambda _host: False)
    with confd_process() as confd:
        (paths.SSCONF_DIR / "ssconf_master_candidates_ips").write_text("127.0.0.1\n")
        key = paths.ETC_DIR / "hmac.key"
        key.touch(mode=0o600)
        key.write_bytes(SECRET)
        (paths.ETC_DIR / "confd.toml").write_text(f'port = {confd.port}\nkey_file = "{key}"\n')
        yield BootingNode(confd, systemctl)


@pytest.fixture
def state_of_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all files of the node are."""
    folders = ("CONTROL_DIR", "MARKS_DIR", "LOCK_DIR", "RUNTIME_DIR", "ETC_DIR", "SSCONF_DIR")
    for name in (*folders, "SPECS_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(paths, name, tmp_path / name)
    for name in ("UNASKED_FILE", "CLAIMS_DIR", "NODE_FILE", "OUTBOX_DIR", "CONFIG_FILE"):
        monkeypatch.setattr(paths, name, tmp_path / name)
    for name in ("OPERATIONS_DIR", "VOLATILE_OPERATIONS_DIR", "SPEC_CACHE_FILE"):
        monkeypatch.setattr(paths, name, tmp_path / name)
    monkeypatch.setattr(store, "_GROUP", "none here")
    return tmp_path


def test_before_the_answer_nothing_starts(node: BootingNode) -> None:
    assert node.barred() == [1, 2]
    with pytest.raises(InstanceError, match="has not asked which instances") as caught:
        start_instance(instance_name(1))
    assert "brine node ask" in str(caught.value.hint)


def test_what_is_anothers_is_set_aside_and_the_rest_is_released(node: BootingNode) -> None:
    node.configure(2, node=2, serial=4)
    node.answers()
    found = node.ask()
    assert found.error is None
    assert found.others == {instance_name(2): Claim(node_name(2), 4)}
    assert (found.held, node.barred()) == ({}, [2])
    assert store.load(instance_name(2)).claim == Claim(node_name(2), 4)
    seen = look(instance_name(2))
    assert (seen.state.status, node_name(2) in seen.state.why) == ("elsewhere", True)
    assert KnownClaims().bar_to(store.load(instance_name(1))) is None
    assert node.ask().others == {}  # it is told once


def test_an_old_answer_sets_nothing_aside(node: BootingNode) -> None:
    """A candidate that was down during the last move still has the instance on its old node."""
    node.configure(2, node=2, serial=2)
    node.answers()
    assert node.ask().others == {}
    assert node.barred() == []


def test_what_the_configuration_does_not_have_is_left_alone(node: BootingNode) -> None:
    del node.configuration["instances"][uuid_of("instance", 2)]
    node.answers()
    found = node.ask()
    assert (found.others, found.held, node.barred()) == ({}, {}, [])


def test_a_node_that_the_cluster_does_not_know_keeps_its_instances(node: BootingNode) -> None:
    for number in (1, 2):
        node.configure(number, node=2, serial=4)
    del node.configuration["nodes"][uuid_of("node", 1)]
    node.configuration["cluster"]["master_node"] = uuid_of("node", 2)
    for one in node.configuration["instances"].values():
        if one["primary_node"] == uuid_of("node", 1):
            one["primary_node"] = uuid_of("node", 2)
    node.answers()
    found = node.ask()
    assert (found.error, found.others, found.held, node.barred()) == (None, {}, {}, [])


def test_a_node_whose_host_has_another_name_keeps_its_instances(
    node: BootingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose an instance is, the UUID of its node says, also if the answer is too large."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="kvm-a"))
    node.configure(1, node=1, serial=5)
    node.configure(2, node=2, serial=5)
    node.answers()
    with monkeypatch.context() as patched:
        refused = AnswerError("too large", ErrorCode.TOO_LARGE)
        ask = ConfdClient.ask

        def answer(self: ConfdClient, question: Any, **more: Any) -> Any:
            if question.type == RequestType.NODE_INSTANCES:
                raise refused
            return ask(self, question, **more)

        patched.setattr(ConfdClient, "ask", answer)
        assert list(node.ask().others) == [instance_name(2)]
    assert node.barred() == [2]


def test_a_host_that_has_not_noted_its_node_asks_nothing(
    node: BootingNode, capsys: pytest.CaptureFixture[str]
) -> None:
    paths.NODE_FILE.unlink()
    node.configure(2, node=2, serial=4)
    node.answers()
    found = node.ask(start_unasked="none")
    assert (found.error, found.others, found.held, node.barred()) == (None, {}, {}, [])
    assert "has not noted which node it is" in capsys.readouterr().err


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_spec_without_a_claim_is_this_nodes(
    node: BootingNode, capsys: pytest.CaptureFixture[str], *, is_answered: bool
) -> None:
    for number in (1, 2):
        node.change(number, node="", claim_serial=0)
        node.configure(number, node=2, serial=4)
    if is_answered:
        node.answers()
    found = node.ask(start_unasked="none")
    assert (found.others, found.held, node.barred()) == ({}, {}, [])
    told = f"{instance_name(1)}: is defined here, and is {node_name(2)}'s"
    assert (told in capsys.readouterr().err) is is_answered


def test_an_answer_that_can_not_be_used_says_nothing_of_others(
    node: BootingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.configure(1, node=3, serial=4)
    node.configure(2, node=2, serial=4)
    ask = ConfdClient.ask

    def answer(self: ConfdClient, question: Any, **more: Any) -> Any:
        found = ask(self, question, **more)
        is_first = question.query == f"/instances/{uuid_of('instance', 1)}"
        return {**found, "primary_node": "no such node"} if is_first else found

    node.answers()
    monkeypatch.setattr(ConfdClient, "ask", answer)
    assert list(node.ask().others) == [instance_name(2)]
    assert node.barred() == [2]


def test_what_is_not_answered_in_time_is_held_back(
    node: BootingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        node.configure(number, node=2, serial=4)
    ask = ConfdClient.ask

    def answer(self: ConfdClient, question: Any, **more: Any) -> Any:
        if question.query == f"/instances/{uuid_of('instance', 1)}":
            raise NoAnswerError("too late")
        return ask(self, question, **more)

    node.answers()
    monkeypatch.setattr(ConfdClient, "ask", answer)
    found = node.boot(ask_timeout=20)
    assert (list(found.others), list(found.held)) == ([instance_name(2)], [instance_name(1)])
    assert found.error
    assert node.systemctl.asked("start") == [["--", "brine-claims.timer"]]


def test_the_boot_holds_all_back_once(node: BootingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fail(*_: object, **__: object) -> None:
        seen.append(node.barred())
        raise ZeroDivisionError

    monkeypatch.setattr(question.Candidates, "claims_on", fail)
    found = node.boot()
    assert seen == [[1, 2]]
    assert "ZeroDivisionError" in str(found.error)
    assert node.barred() == [1]  # the other has no disk that another node could have
    assert node.systemctl.asked("start") == [["--", "brine-claims.timer"]]
    node.ask(boots=True, start_unasked="none")
    assert seen == [[1, 2], [1]]


def test_a_question_after_one_that_was_killed_starts_instances(node: BootingNode) -> None:
    node.answers()
    assert node.ask(boots=True, ask_timeout=20).error is None
    assert node.systemctl.asked("restart") == [["--", "brine-instances.service"]]


def test_a_mistake_of_confd_holds_nothing_back_where_there_is_no_cluster(node: BootingNode) -> None:
    (paths.ETC_DIR / "confd.toml").write_text("port = none")
    (paths.SSCONF_DIR / "ssconf_master_candidates_ips").unlink()
    found = node.ask(start_unasked="none")
    assert (found.error, found.held, node.barred()) == (None, {}, [])


def test_one_question_at_a_time(node: BootingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier one without an answer must not hold back what a later one has released."""
    monkeypatch.setattr("brine.moves.asking._LOCK_S", 0.0)
    options = Namespace(boot=True, json=False)
    with node_lock("claims-question", timeout_s=0), pytest.raises(LockedError):
        ask(options)
    assert node.barred() == [1, 2]
    node.answers()
    (paths.ETC_DIR / "moves.toml").write_text("ask_timeout = 20\n")
    assert (ask(options), node.barred()) == (0, [])


@pytest.mark.parametrize("option", ["-drive", "--drive", "--blockdev", "-virtfs", "-hda", "-fsdev"])
def test_a_drive_of_extra_arguments_may_be_shared(node: BootingNode, option: str) -> None:
    node.change(2, extra_arguments=(option, "anything"))
    assert list(node.ask().held) == [instance_name(1), instance_name(2)]


@pytest.mark.parametrize(
    ("setting", "held"), [("local", [1]), ("all", []), ("none", [1, 2])], ids=str
)
def test_without_an_answer_only_what_no_other_node_could_have_starts(
    node: BootingNode, setting: str, held: list[int]
) -> None:
    found = node.ask(start_unasked=setting)
    assert found.error
    assert sorted(found.held) == [instance_name(n) for n in held]
    assert node.barred() == held
    for why in found.held.values():
        assert "master candidates have answered" in why
        assert setting != "local" or SHARED in why


def test_it_goes_on_asking_and_starts_what_it_held_back(node: BootingNode) -> None:
    node.boot()
    assert node.systemctl.asked("start") == [["--", "brine-claims.timer"]]
    assert node.barred() == [1]
    node.answers()
    assert node.ask(ask_timeout=20).error is None
    assert node.systemctl.asked("stop") == [["--", "brine-claims.timer"]]
    assert node.systemctl.asked("restart") == [["--", "brine-instances.service"]]
    assert node.barred() == []


def test_what_is_released_is_not_held_back_again(node: BootingNode) -> None:
    """As when the network fails later, and an admin asks."""
    assert node.boot(start_unasked="all").error
    assert node.systemctl.asked("start") == [["--", "brine-claims.timer"]]  # it goes on asking
    found = node.ask(start_unasked="none")
    assert found.error
    assert (found.held, node.barred()) == ({}, [])


def test_a_wrong_key_is_no_answer(node: BootingNode) -> None:
    node.configure(2, node=2, serial=4)
    node.answers()
    (paths.ETC_DIR / "hmac.key").write_bytes(b"another secret of this test\n")
    assert node.ask().error
    assert node.barred() == [1]
    assert store.load(instance_name(2)).claim == Claim(HERE, 3)


def test_its_own_old_copy_is_no_answer(node: BootingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that boots alone does not believe itself; the only candidate does."""
    own = node.configuration["nodes"][uuid_of("node", 1)]["primary_ip"]
    (paths.SSCONF_DIR / "ssconf_master_candidates_ips").write_text("127.0.0.1\n192.0.2.254\n")
    monkeypatch.setattr(question, "is_own_address", lambda host: host == "127.0.0.1")
    node.answers()
    assert node.ask().error
    assert node.barred() == [1]
    # While no interface has its address yet, it is known by ssconf.
    (paths.SSCONF_DIR / "ssconf_master_candidates_ips").write_text(f"{own}\n")
    (paths.SSCONF_DIR / "ssconf_node_primary_ips").write_text(f"{HERE} {own}\n")
    with (paths.ETC_DIR / "confd.toml").open("a") as settings:
        settings.write(f'config_file = "{node.confd.config}"\n')
    assert node.ask().error is None
    assert node.barred() == []


def test_of_three_candidates_one_is_not_believed_alone(node: BootingNode) -> None:
    """It was down when the instance was moved, and is the first that is up again."""
    node.answers()
    node.configure(1, node=2, serial=4)
    with confd_process() as newer:
        peers = [f"127.0.0.1:{one.port}" for one in (node.confd, newer)] + ["192.0.2.254"]
        (paths.SSCONF_DIR / "ssconf_master_candidates_ips").write_text("\n".join(peers))
        found = node.ask(ask_timeout=2)
        assert "1 of 3 peers answered, and 2 are needed" in str(found.error)
        assert (found.others, node.barred()) == ({}, [1])
        newer.write_config(node.configuration)
        newer.start()
        found = node.ask(ask_timeout=20)
        assert (found.error, list(found.others)) == (None, [instance_name(1)])


def test_its_own_copy_counts_if_it_is_newer_than_the_others(
    node: BootingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of three candidates, of which another one has the last change, and is down."""
    node.answers()
    node.configure(2, node=2, serial=4)
    own = paths.ETC_DIR / "config.data"
    own.write_text(json.dumps(node.configuration))
    with (paths.ETC_DIR / "confd.toml").open("a") as settings:
        settings.write(f'config_file = "{own}"\n')
    peers = ["127.0.0.2", f"127.0.0.1:{node.confd.port}", "192.0.2.254"]
    (paths.SSCONF_DIR / "ssconf_master_candidates_ips").write_text("\n".join(peers))
    monkeypatch.setattr(question, "is_own_address", lambda host: host == "127.0.0.2")
    found = node.ask(ask_timeout=20)
    assert (found.error, list(found.others)) == (None, [instance_name(2)])


def test_an_only_candidate_without_its_configuration_holds_nothing_back(node: BootingNode) -> None:
    own = node.configuration["nodes"][uuid_of("node", 1)]["primary_ip"]
    (paths.SSCONF_DIR / "ssconf_master_candidates_ips").write_text(f"{own}\n")
    (paths.SSCONF_DIR / "ssconf_node_primary_ips").write_text(f"{HERE} {own}\n")
    with (paths.ETC_DIR / "confd.toml").open("a") as settings:
        settings.write(f'config_file = "{paths.ETC_DIR}/none"\n')
    found = node.boot(start_unasked="none")
    assert (found.error, found.others, found.held, node.barred()) == (None, {}, {}, [])


@pytest.mark.parametrize("lacks", ["key", "candidates", "all candidates"])
def test_a_host_without_a_cluster_asks_nothing(node: BootingNode, lacks: str) -> None:
    key, list_of = paths.ETC_DIR / "hmac.key", paths.SSCONF_DIR / "ssconf_master_candidates_ips"
    if lacks == "all candidates":
        list_of.write_text("")
    else:
        (key if lacks == "key" else list_of).unlink()
    found = node.ask(start_unasked="none", ask_timeout=600)
    assert (found.error, found.held, node.barred()) == (None, {}, [])


def test_a_mistake_in_the_settings_leaves_the_defaults(
    node: BootingNode, capsys: pytest.CaptureFixture[str]
) -> None:
    del node
    (paths.ETC_DIR / "moves.toml").write_text('start_unasked = "some"\n')
    assert settings_or_defaults() == MovesSettings()
    assert "moves.toml: start_unasked: " in capsys.readouterr().err


@pytest.mark.parametrize("killed_at", ["question.Candidates.claims_on", "asking.set_aside"])
def test_a_kill_at_any_step_leaves_what_is_not_known_held_back(
    node: BootingNode, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    node.configure(2, node=2, serial=4)
    node.answers()

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"brine.moves.{killed_at}", killed)
        with pytest.raises(KeyboardInterrupt):
            node.ask(ask_timeout=20)
    assert node.barred() == [1, 2]
    assert node.ask(ask_timeout=20).error is None
    assert node.barred() == [2]


def test_the_configuration_of_the_tests_has_these_claims(node: BootingNode) -> None:
    configuration = Configuration.from_json(json.loads(json.dumps(node.configuration)))
    one = configuration.instances[uuid_of("instance", 1)]
    assert claim_of(configuration, one) == Claim(HERE, 3)
