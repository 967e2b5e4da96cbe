"""What an instance offers of itself is what moves; and what of an offer a node refuses."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.operation import AnswerState
from brine.instance import store
from brine.instance.kvm import uefi
from brine.instance.node_facts import NodeFacts
from brine.instance.observe import look
from brine.instance.store import InstanceError
from brine.instance.validate import completed
from brine.moves import (
    arriving,
    belongings,
    named_files,
    records,
    source_steps,
    target_steps,
)
from brine.moves.belongings import Belonging
from brine.moves.cluster_keys import ClusterKeys
from brine.moves.migration import MoveError
from brine.moves.offer import make_offer
from brine.moves.offered import ReceivedOffer
from brine.moves.present import present_spec, state_of
from brine.moves.records import AskedStep
from brine.moves.target import TargetMove
from brine.storage.volume import VolumeSnapshot
from brine.vm.address import DeviceKind, uuid_of_mac
from brine.vm.files import InstanceFiles
from brine.vm.nic import Nic
from brine.vm.runtime_file import change_file
from brine.vm.slots import pci_slot
from brine.vm.spec import to_json
from brine.vm.vif import Vif
from brine.watcher import restart_counter
from brine.watcher.restart_counter import Tries
from cluster_key import SECRET, give_keys
from lab.runtime_file import write_runtime_file

SPEC = {"name": "web1", "memory_mib": 128}
MAC = "52:54:00:00:00:09"


@pytest.mark.parametrize("changed", [{}, {"memory_mib": 256}])
def test_what_has_changed_since_it_was_offered_does_not_move(
    brine: Callable[..., Any], own_node: Path, monkeypatch: pytest.MonkeyPatch, changed: Any
) -> None:
    for name in ("MOVES_DIR", "MOVES_STATUS_DIR", "CLAIMS_DIR"):
        monkeypatch.setattr(paths, name, own_node / name)
    assert brine("define", "-", stdin=SPEC)[0] == 0
    facts = {"instance": "web1", "uuid": store.load("web1").uuid, "serial": 2, "target": "n2"}
    facts |= {"is_live": False, "copies": False, "runs": False, "run": "unknown"}
    facts |= {"state": state_of(look("web1"))}
    assert brine("define", "-", stdin=SPEC | changed)[0] == 0
    answer = source_steps.answer(AskedStep("0176-0", "stop", facts))
    assert answer.state is (AnswerState.FAILED if changed else AnswerState.RUNNING), answer
    assert (records.find("web1") is None) == bool(changed)


def test_what_was_plugged_in_comes_along_also_of_one_that_was_stopped_since(
    brine: Callable[..., Any],
) -> None:
    """Its next start here would have it, too."""
    assert brine("define", "-", stdin=SPEC)[0] == 0
    spec = store.load("web1")
    hot = Nic(uuid=uuid_of_mac(MAC), mac=MAC, link="br0", slot=21)
    entry = Vif.of(replace(spec, nics=(hot,)), hot).recorded(pci_slot(21))
    file = write_runtime_file(spec)
    change_file(file, lambda runtime: runtime.with_device(DeviceKind.NIC, entry))
    assert present_spec(look("web1")) == replace(spec, nics=(replace(hot, by_hand=True),))
    file.write_text("{")
    assert present_spec(look("web1")) == spec  # its start would tell


def offered(**keys: Any) -> dict[str, Any]:
    """The offer of an instance that is off."""
    node = NodeFacts(
        node="n1", version="", memory_mib=1, memory_available_mib=1, links={}, units={}
    )
    return {
        "spec": to_json(completed(SPEC | keys)),
        "node": json.loads(json.dumps(node.to_json())),
        "live": False,
        "runs": False,
        "disks": [],
        "bitmaps": {},
        "runtime": None,
        "comes_along": [],
        "uefi_bytes": 0,
        "cluster_keys": ClusterKeys.read().ids(),
    }


@pytest.fixture(autouse=True)
def keys(own_node: Path) -> None:
    give_keys()


def test_a_move_to_another_node_is_not_prepared(
    own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOVES_DIR", "MOVES_STATUS_DIR", "CLAIMS_DIR"):
        monkeypatch.setattr(paths, name, own_node / name)
    offer = offered()
    facts = {"instance": "web1", "uuid": offer["spec"]["uuid"], "serial": 2, "offered": offer}
    facts |= {"source": "n1", "target": "n9"}
    answer = target_steps.answer(AskedStep("0176-0", "prepare", facts))
    assert answer.state is AnswerState.FAILED
    assert "n9, which is not this node" in answer.error
    assert records.find("web1") is None


@pytest.fixture
def folder(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the node with a file that only root may read, and a file system of both nodes
    with a link to that."""
    (own_node / "root-only").write_text("secret")
    (own_node / "root-only").chmod(0o600)
    (shared := own_node / "nfs").mkdir()
    (shared / "link").symlink_to(own_node / "root-only")
    (shared / "file").touch(mode=0o600)
    mounts = own_node / "mountinfo"
    mounts.write_text(f"1 0 8:1 / / rw - ext4 /dev/x rw\n2 1 0:9 / {shared} rw - nfs4 n:/ rw\n")
    monkeypatch.setattr(named_files, "MOUNTS", mounts)
    return own_node


def refused(offer: dict[str, Any]) -> str:
    """Why an offer does not come here."""
    return "\n".join(one.why for one in ReceivedOffer(offer).obstacles())


@pytest.mark.parametrize("file", ["root-only", "nfs/link", "nfs/../root-only", "nfs"])
@pytest.mark.parametrize("key", ["kernel", "firmware", "cdroms", "path", "backing"])
def test_an_offer_names_no_file_that_is_this_nodes_alone(folder: Path, key: str, file: str) -> None:
    named = f"{folder}/{file}"
    disk: dict[str, Any] = {"path": f"{folder}/nfs/file", "format": "qcow2"}
    if key == "path":
        disk["path"] = named
    if key == "backing":
        disk["backing"] = {"path": named, "format": "raw"}
    more: dict[str, Any] = {"cdroms": [named]} if key == "cdroms" else {key: named}
    said = refused(offered(disks=[disk], **({} if key in disk else more)))
    assert named in said
    assert "file system of several nodes" in said


def test_an_offer_has_files_that_both_nodes_have(folder: Path) -> None:
    file = f"{folder}/nfs/file"
    disk = {"path": file, "format": "qcow2", "backing": {"path": file, "format": "raw"}}
    assert "several" not in refused(offered(disks=[disk], cdroms=[file], kernel="/bin/true"))


def test_the_runtime_file_names_no_other_disk(folder: Path) -> None:
    spec = SPEC | {"disks": [{"path": f"{folder}/nfs/file"}]}
    offer = offered(**spec) | {"live": True}
    data = json.loads(write_runtime_file(completed(spec)).read_text())
    data["disks"][0] |= {"path": f"{folder}/root-only", "uuid": data["disks"][0]["uuid"].upper()}
    offer["runtime"] = json.dumps(data)
    assert "root-only is not copied" in refused(offer)


def test_root_runs_no_program_that_the_other_node_may_write(folder: Path) -> None:
    assert "is not run as root" in refused(offered(qemu=f"{folder}/nfs/file"))


def test_no_socket_of_the_node_is_taken(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/vnc")
        listener.listen()
        offer = offered(vnc_bind=f"{folder}/vnc")
        assert "another program listens there" in refused(offer)
    assert "another program" not in refused(offer)


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ("vnc/web1", ""),
        ("cron.d/web1", "brings only files of"),
        ("vnc/../cron.d/web1", "brings only files of"),
    ],
)
def test_a_password_comes_along_to_a_folder_of_its_own(folder: Path, file: str, word: str) -> None:
    name = f"{paths.ETC_DIR}/{file}"
    offer = offered(vnc_bind="::1", vnc_password_file=name) | {"comes_along": ["vnc_password"]}
    said = refused(offer)
    assert word in said
    assert ("VNC" in said or "move brings" in said) == bool(word)


def test_one_password_file_comes_with_one_instance_at_a_time(
    own_node: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for its password has one that no one knows in that file."""
    for name in ("MOVES_DIR", "MOVES_STATUS_DIR", "CLAIMS_DIR"):
        monkeypatch.setattr(paths, name, own_node / name)
    file = paths.ETC_DIR / "vnc/all"
    keys = {"vnc_bind": "::1", "vnc_password_file": f"{file}"}
    first = offered(**keys) | {"comes_along": ["vnc_password"]}
    second = offered(**keys | {"name": "web2"}) | {"comes_along": ["vnc_password"]}
    assert "brings it" not in refused(second)
    move = TargetMove("0176", "web1", "n1", 2, is_live=True, copies=False, runs=True)
    known = {"offered": first, "makes_password": True}
    record = records.begin(move, first["spec"]["uuid"], known, keeps_out="is being moved here")
    assert "brings it" not in refused(first)
    assert f"{file}: web1 brings it" in refused(second)
    # It does not come. But another instance was defined meanwhile that has the file.
    belongings.keep_password_place(ReceivedOffer(first).spec)
    store.save(ReceivedOffer(second).spec)
    with records.working_for(record):
        arriving.remove_all(ReceivedOffer(first), {}, made_password=True)
        assert file.exists()
        store.remove("web2")
        arriving.remove_all(ReceivedOffer(first), {}, made_password=True)
    assert not file.exists()


@pytest.mark.parametrize(("size", "word"), [(16, ""), (8, "one release of the firmware"), (0, "")])
def test_a_guest_with_uefi_goes_where_its_variables_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, size: int, word: str
) -> None:
    for name in ("code", "variables"):
        (folder / name).write_bytes(bytes(16))
    descriptor = {
        "interface-types": ["uefi"],
        "features": [],
        "targets": [{"architecture": "x86_64", "machines": ["*"]}],
        "mapping": {
            "device": "flash",
            "executable": {"filename": f"{folder}/code", "format": "raw"},
            "nvram-template": {"filename": f"{folder}/variables", "format": "raw"},
        },
    }
    (folder / "uefi.json").write_text(json.dumps(descriptor))
    monkeypatch.setattr(uefi, "FOLDERS", (folder,))
    offer = offered(firmware="uefi", machine="q35") | {"uefi_bytes": size}
    said = refused(offer)
    assert word in said
    assert ("firmware" in said) == bool(word)


SNAPSHOT = {"name": "before", "since": 7.5, "used_bytes": 512}


@pytest.mark.parametrize(
    "lie",
    [
        {"snapshots": [SNAPSHOT | {"name": "../../../etc/cron.d/x"}]},
        {"snapshots": [SNAPSHOT | {"name": ""}]},
        {"snapshots": [SNAPSHOT | {"since": float("nan")}]},
        {"snapshots": [SNAPSHOT | {"used_bytes": -1}]},
        {"snapshots": [SNAPSHOT, SNAPSHOT]},
        {"snapshots": [SNAPSHOT | {"name": f"{number}"} for number in range(10)]},
        {"format": "vmdk"},
    ],
    ids=lambda lie: str(lie)[:60],
)
def test_snapshots_have_names_of_files_in_their_folder(own_node: Path, lie: dict[str, Any]) -> None:
    disk = {"uuid": "", "device_id": "", "copies": True, "unit": "/srv"}
    disk |= {"size_bytes": 512, "format": "raw", "snapshots": [SNAPSHOT]}
    (sound,) = ReceivedOffer(offered() | {"disks": [disk]}).disks
    assert sound.snapshots == (VolumeSnapshot(name="before", since=7.5, used=512),)
    with pytest.raises(MoveError, match="is no offer"):
        ReceivedOffer(offered() | {"disks": [disk | lie]})


def test_the_watchers_tries_come_along(folder: Path) -> None:
    tries = {"count": 3, "last": 1.5, "given_up": True}
    arriving.keep_tries(ReceivedOffer(offered() | {"tries": tries}))
    assert restart_counter.load() == {"web1": Tries(3, 1.5, given_up=True)}
    for told in (5, {"count": -1}):
        with pytest.raises(BrineError, match="web1: its tries"):
            arriving.keep_tries(ReceivedOffer(offered() | {"tries": told}))


@pytest.mark.parametrize(
    "lie",
    [
        {"vnc_password": b"123456789"},
        {"vnc_password": b"a\tb"},
        {"vnc_password": b""},
        {"vnc_password": b"a\nb"},
        {"vnc_password": b"5ecr\xe4t"},
        {"uefi_vars": bytes(belongings.LARGEST + 1)},
        {"passwd": b"root::0:0::/:/bin/sh"},
        {"uefi_vars": None},
    ],
    ids=lambda lie: next(iter(lie)),
)
def test_what_can_not_come_along(lie: dict[str, bytes | None]) -> None:
    files = {
        name: None if data is None else base64.b64encode(data).decode()
        for name, data in lie.items()
    }
    with pytest.raises(MoveError) as caught:
        belongings.of_message(files)
    assert "5ecr" not in str(caught.value)


def test_what_comes_along_is_kept_as_it_was(own_node: Path) -> None:
    """It may come twice. A QEMU that waits has its files open, and has said that it starts."""
    paths.CONSOLE_LOG_DIR.mkdir()
    spec = completed(SPEC | {"firmware": "uefi", "machine": "q35"})
    spec = replace(spec, vnc_bind="::1", vnc_password_file=f"{own_node}/vnc/web1")
    files = InstanceFiles("web1")
    files.uefi_variables.write_bytes(b"none")
    with files.uefi_variables.open("rb") as opened:
        files.console_log.write_bytes(b"--- web1 starts ---\n")
        belongings.keep_password_place(spec)
        first = Path(spec.vnc_password_file).read_bytes()
        found = {
            Belonging.UEFI_VARIABLES: b"boot order",
            Belonging.CONSOLE_LOG: b"what it has said\n",
            Belonging.VNC_PASSWORD: b"5ecret",
        }
        for _ in range(2):
            belongings.keep_belongings(spec, found, makes_password=True)
        assert opened.read() == b"boot order"
    assert files.console_log.read_bytes() == b"what it has said\n--- web1 starts ---\n"
    assert len(first) == 9
    assert Path(spec.vnc_password_file).read_bytes() == b"5ecret\n"
    assert Path(spec.vnc_password_file).stat().st_mode & 0o777 == 0o600
    brought = belongings.belongings_of(spec)
    assert brought[Belonging.UEFI_VARIABLES] == b"boot order"
    belongings.keep_belongings(spec, {Belonging.VNC_PASSWORD: b"other"}, makes_password=False)
    assert Path(spec.vnc_password_file).read_bytes() == b"5ecret\n"


def test_an_offer_has_no_secret(brine: Callable[..., Any], own_node: Path) -> None:
    """Salt carries it, and keeps it in its job cache."""
    (own_node / "password").write_text("5ecret\n")
    (own_node / "password").chmod(0o600)
    keys = {"vnc_bind": "::1", "vnc_port": 5900, "vnc_password_file": f"{own_node}/password"}
    assert brine("define", "-", stdin=SPEC | keys)[0] == 0
    paths.CONSOLE_LOG_DIR.mkdir(exist_ok=True)
    InstanceFiles("web1").console_log.write_text("one-time word: swordfish\n")
    offer = make_offer("web1", cold=False)
    assert set(offer["comes_along"]) == {"console_log", "vnc_password"}
    text = json.dumps(offer)
    for secret in ("5ecret", "swordfish", SECRET.decode().strip()):
        assert secret not in text
        assert base64.b64encode(secret.encode()).decode().rstrip("=")[:-1] not in text


@pytest.mark.parametrize("fate", [None, "take"])
def test_what_an_earlier_move_has_left_is_dropped_before_a_later_one_is_prepared(
    own_node: Path, monkeypatch: pytest.MonkeyPatch, fate: str | None
) -> None:
    for name in ("MOVES_DIR", "MOVES_STATUS_DIR", "CLAIMS_DIR"):
        monkeypatch.setattr(paths, name, own_node / name)
    uuid = completed(SPEC).uuid
    earlier = TargetMove("0176", "web1", "n1", 2, is_live=True, copies=True, runs=True)
    records.begin(earlier, uuid, {"fate": fate} if fate else {}, keeps_out="is being moved")
    facts = {"instance": "web1", "uuid": uuid, "serial": 2, "source": "n1", "target": "n2"}
    stale = target_steps.answer(AskedStep("0175-1", "prepare", facts))
    assert stale.state is AnswerState.FAILED
    answer = target_steps.answer(AskedStep("0177-1", "prepare", facts))
    assert answer.state is (AnswerState.FAILED if fate else AnswerState.RUNNING)
    found = records.find("web1")
    assert found
    assert (found.move.id, found.facts.get("fate")) == ("0176", fate or "drop")


def test_volumes_are_open_before_the_last_flush(own_node: Path) -> None:
    """The kernel tells an error of writing once, and only to those that have the file open."""
    spec = completed(SPEC | {"disks": [{"path": f"{own_node}/missing"}]})
    with pytest.raises(InstanceError), arriving.synced(spec, {spec.disks[0].uuid}):
        pytest.fail("it is flushed before")
