"""Taps on the real kernel, each test in a network namespace of its own."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.files import unfinished
from brine.common.locks import LockedError
from brine.hotplug.net import records
from brine.hotplug.net.gc import LeftoverKind, find_leftovers, remove_leftovers
from brine.hotplug.net.netlink import Link, Netlink
from brine.hotplug.net.records import TapState, list_taps
from brine.hotplug.net.scripts import ScriptError
from brine.hotplug.net.tap import (
    TapBusyError,
    TapError,
    TapExistsError,
    held_taps,
    holders,
    open_tap,
)
from brine.hotplug.net.wiring import bring_up, open_own_tap, take_down, unwire, wire
from brine.vm.values import Mode
from brine.vm.vif import Vif
from component.namespaces import (
    Wire,
    add_script,
    ip,
    new_namespace,
    read_frame,
    send_frame,
)
from lab.traces import descriptor_links
from lab.waiting import wait_for

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="networks take root"),
    pytest.mark.both_kernels,
]

NIC = "0b5bcb4e-8f2c-4f2e-9ab6-6f7b1b0a3b0d"
WEB = Vif(
    instance="web1.example.com",
    uuid=NIC,
    mode=Mode.BRIDGED,
    link="br0",
    mac="52:54:00:12:34:56",
    index=0,
)
NAME = WEB.tap_name()


@pytest.fixture(autouse=True)
def node(own_files: None) -> Iterator[None]:
    """A namespace with a bridge, and a wire to it: what is sent to `wire0` comes out of it."""
    with new_namespace():
        ip("link add br0 type bridge")
        ip("link add port0 address 02:00:00:00:00:01 type veth peer name wire0")
        ip("link set port0 master br0")
        for name in ("br0", "port0", "wire0"):
            ip(f"link set {name} up")
        yield


def link(name: str = NAME) -> Link | None:
    with Netlink() as netlink:
        return netlink.find(name)


def present(name: str = NAME) -> Link:
    found = link(name)
    assert found
    return found


def descriptors() -> list[str]:
    """This process's descriptors, as what they are."""
    return sorted(descriptor_links(os.getpid()))


def master(name: str = NAME) -> str | None:
    """The name of the bridge that an interface is a port of."""
    (shown,) = json.loads(ip(f"-json link show {name}"))
    found = shown.get("master")
    return None if found is None else str(found)


# Opening.


def test_a_tap_lives_as_long_as_somebody_has_a_descriptor() -> None:
    with open_tap("vm-web1-abcdef", queues=1) as tap:
        assert present(tap.name).kind == "tun"
        kept = os.dup(tap.queues[0])
    assert present("vm-web1-abcdef").carrier
    os.close(kept)
    assert link("vm-web1-abcdef") is None


def test_descriptors_are_not_inherited() -> None:
    with open_tap("t0", queues=2) as tap:
        assert len(tap.queues) == 2
        for descriptor in tap.queues:
            assert not os.get_inheritable(descriptor)


def test_each_queue_carries_frames() -> None:
    with open_tap("t0", queues=4) as tap:
        assert present("t0").multi_queue
        ip("link set t0 up")
        seen = Wire("t0")
        for number, queue in enumerate(tap.queues):
            send_frame(queue, b"from queue %d" % number)
            assert seen.next().payload == b"from queue %d" % number
        seen.close()


def test_a_name_that_another_interface_has_is_refused() -> None:
    with pytest.raises(TapExistsError, match="br0: there is an interface of that name"):
        open_tap("br0")
    with pytest.raises(TapExistsError, match="is no tap with such queues"):
        open_tap("br0", reuse=True)
    with open_tap("t0") as tap, pytest.raises(TapExistsError):
        open_tap(tap.name)


def test_who_has_a_tap_open_is_named() -> None:
    with open_tap("t0"):
        with pytest.raises(TapBusyError, match=f"process {os.getpid()} "):
            open_tap("t0", reuse=True)
        assert [holder.process for holder in holders("t0")] == [os.getpid()]
        assert list(held_taps()) == ["t0"]
        # Another network's tap of the same name is another tap.
        assert seen_from_another_network() == []
    assert held_taps() == {}


def seen_from_another_network() -> list[str]:
    program = "from brine.hotplug.net.tap import held_taps; print(*held_taps())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    looking = ["unshare", "--net", sys.executable, "-c", program]
    done = subprocess.run(looking, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_too_many_queues_are_refused_and_nothing_stays() -> None:
    before = descriptors()
    with pytest.raises(TapError, match="1 to 256 queues"):
        open_tap("t0", queues=257)
    assert descriptors() == before


@pytest.mark.little_of_kernels
def test_a_missing_device_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brine.hotplug.net.tap._TUN_DEVICE", tmp_path / "tun")
    with pytest.raises(TapError, match="there is no") as caught:
        open_tap("t0")
    assert "modprobe tun" in str(caught.value.hint)


def test_vhost_is_one_descriptor_a_queue_or_a_clear_refusal() -> None:
    before = descriptors()
    if Path("/dev/vhost-net").exists():
        with open_tap("t0", queues=2, vhost=True) as tap:
            assert len(tap.vhost) == 2
            for descriptor in tap.vhost:
                fcntl.ioctl(descriptor, 0xAF01)  # VHOST_SET_OWNER: it is one
    else:
        with pytest.raises(TapError, match="there is no /dev/vhost-net") as caught:
            open_tap("t0", queues=2, vhost=True)
        assert "modprobe vhost_net" in str(caught.value.hint)
    assert link("t0") is None
    assert descriptors() == before


@pytest.mark.little_of_kernels
def test_without_the_right_it_is_said() -> None:
    program = (
        "import os; os.setgid(65534); os.setuid(65534)\n"
        "from brine.common.errors import BrineError\n"
        "from brine.hotplug.net.tap import open_tap\n"
        "try: open_tap('t0')\n"
        "except BrineError as error: print(error, '/', error.hint)"
    )
    # As an ordinary user who may open the device, which most distributions let anybody do.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["/usr/bin/python3", "-c", program], env=environment, capture_output=True, text=True
    )
    assert "not permitted / be root" in done.stdout, done.stderr


@pytest.mark.little_of_kernels
def test_two_hundred_taps_leak_no_descriptors() -> None:
    before = descriptors()
    taps = [open_tap(f"t{number}") for number in range(200)]
    for tap in taps:
        tap.close()
    assert descriptors() == before
    assert "t199" not in ip("link")


def test_others_can_not_open_a_tap_of_ours_even_with_a_queue_free() -> None:
    with open_tap(NAME, queues=2):
        assert not opens_as_nobody(0x5102)


def opens_as_nobody(flags: int = 0x5002) -> bool:
    """Whether an ordinary user can open the tap by its name, as a QEMU of his would."""
    program = (
        "import sys, os, fcntl, struct; tun = os.open('/dev/net/tun', os.O_RDWR)\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "request = struct.pack('16sH22x', sys.argv[1].encode(), int(sys.argv[2]))\n"
        "fcntl.ioctl(tun, 0x400454CA, request)"
    )
    opening = [sys.executable, "-c", program, NAME, str(flags)]
    return subprocess.run(opening, capture_output=True, check=False).returncode == 0


# Bridged.


def test_a_bridged_tap_carries_frames_both_ways() -> None:
    with open_tap(NAME) as tap:
        wired = wire(tap, WEB)
        assert wired.changed
        seen = Wire("wire0")
        send_frame(tap.queues[0], b"from the guest")
        assert seen.next().payload == b"from the guest"
        seen.send(b"to the guest")
        assert read_frame(tap.queues[0]).payload == b"to the guest"
        seen.close()
        assert present().alias == f"brine instance=web1.example.com nic={NIC}"
        assert present().up


def test_the_mtu_is_the_bridges_which_keeps_its_own() -> None:
    ip("link set port0 mtu 9000")
    ip("link set br0 mtu 9000")
    with open_tap(NAME) as tap:
        assert wire(tap, WEB).mtu == 9000
        assert present().mtu == 9000
        assert present("br0").mtu == 9000


@pytest.mark.parametrize("set_by_hand", [False, True])
def test_a_small_mtu_of_a_nic_is_its_own(*, set_by_hand: bool) -> None:
    if set_by_hand:
        ip("link set port0 mtu 2000")
        ip("link set br0 mtu 1600")
    before = present("br0").mtu
    small, smaller = replace(WEB, mtu=1400), replace(WEB, uuid="1", mtu=1300)
    with open_tap(NAME) as tap, open_tap(smaller.tap_name()) as other:
        assert wire(tap, small).mtu == 1400
        assert wire(other, smaller).mtu == 1300
        assert (present().mtu, present("br0").mtu) == (1400, before)
        unwire(other)
        assert wire(tap, WEB).mtu == before
    assert present("br0").mtu == before


def test_the_bridge_keeps_its_address_when_guests_come() -> None:
    before = present("br0").mac
    with open_tap(NAME) as tap:
        wire(tap, WEB)
        assert present().mac.startswith("fe:")
        assert present("br0").mac == before


def test_the_node_says_nothing_on_a_bridged_tap() -> None:
    with open_tap(NAME) as tap:
        wire(tap, WEB)
        assert "inet6" not in ip(f"address show {NAME}")


@pytest.mark.parametrize(
    ("link_name", "vlan", "said", "hint"),
    [
        ("br1", "", "there is no bridge br1", "BRIDGES"),
        ("wire0", "", "wire0 is no bridge", "openvswitch"),
        ("lo", "", "lo is no bridge", "openvswitch"),
        ("br0", "100", "VLAN filtering is off", "vlan_filtering 1"),
    ],
)
@pytest.mark.little_of_kernels
def test_a_bridge_that_can_not_be_leaves_nothing(
    link_name: str, vlan: str, said: str, hint: str
) -> None:
    wiring = Vif(instance="web1", uuid=NIC, mode=Mode.BRIDGED, link=link_name, vlan=vlan)
    with open_tap(NAME) as tap:
        with pytest.raises(BrineError, match=said) as caught:
            wire(tap, wiring)
        assert hint in str(caught.value.hint)
        assert not present().up
        assert master() is None
    assert records.load_all() == {}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("[ $1 != pre-up ] || ip link delete br0", "there is no bridge br0"),
        ('[ $1 != up ] || ip link delete "$INTERFACE"', f"no interface {NAME}"),
    ],
)
@pytest.mark.little_of_kernels
def test_a_bridge_or_tap_that_goes_away_meanwhile_is_told(script: str, said: str) -> None:
    add_script("delete", script)
    with open_tap(NAME) as tap:
        with pytest.raises(BrineError, match=said):
            wire(tap, WEB)
        assert not ((found := link()) and found.up)
    assert records.load_all() == {}


@pytest.mark.little_of_kernels
def test_a_bridge_that_goes_away_between_look_and_touch_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_master = Netlink.set_master

    def too_late(self: Netlink, port: Link, bridge: Link | None) -> None:
        if bridge:
            ip(f"link delete {bridge.name}")
        set_master(self, port, bridge)

    monkeypatch.setattr(Netlink, "set_master", too_late)
    with open_tap(NAME) as tap:
        with pytest.raises(BrineError, match=r"ENODEV|EINVAL"):
            wire(tap, WEB)
        assert not present().up
    assert records.load_all() == {}


def test_wiring_twice_is_the_same_as_once() -> None:
    add_script("count", f"echo $1 >>{paths.CONTROL_DIR}/calls")
    with open_tap(NAME) as tap:
        assert wire(tap, WEB).changed
        assert not wire(tap, WEB).changed
        ip(f"link set {NAME} nomaster")
        ip(f"link set {NAME} down")
        assert not wire(tap, WEB).changed
        assert master() == "br0"
        assert present().up
    assert (paths.CONTROL_DIR / "calls").read_text().split() == ["pre-up", "up"]


def test_other_wishes_replace_the_first() -> None:
    ip("link add br1 type bridge")
    with open_tap(NAME) as tap:
        wire(tap, WEB)
        wire(
            tap, Vif(instance="web1.example.com", uuid=NIC, mode=Mode.BRIDGED, link="br1", mtu=1400)
        )
        assert master() == "br1"
        assert present().mtu == 1400


@pytest.mark.little_of_kernels
def test_a_tap_of_another_nic_is_left_alone() -> None:
    with open_tap("t0") as tap:
        wire(tap, WEB)
        with pytest.raises(TapError, match=f"belongs to NIC {NIC} of web1.example.com"):
            wire(tap, Vif(instance="db", uuid="0", mode=Mode.BRIDGED, link="br0"))
        assert master("t0") == "br0"


@pytest.mark.little_of_kernels
def test_a_strangers_tap_is_left_alone() -> None:
    with open_tap("t0") as tap:
        ip("link set t0 alias my-own")
        with pytest.raises(TapError, match="belongs to something else: my-own"):
            wire(tap, WEB)
        with pytest.raises(TapError, match="is no tap"):
            wire("br0", WEB)


def test_unwiring_leaves_the_tap_unconnected() -> None:
    with open_tap(NAME) as tap:
        wire(tap, WEB)
        assert unwire(tap)
        assert master() is None
        assert not present().up
        assert not unwire(tap)


@pytest.mark.little_of_kernels
def test_a_bridge_without_vlans_does_not_wait_for_pyroute2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyroute2", None)  # whoever loads it now gets an error
    with open_tap(NAME) as tap:
        assert wire(tap, WEB).changed
        assert not wire(tap, WEB).changed
        assert unwire(tap)
    bring_up(WEB)
    assert remove_leftovers(at_once=True) != []


# Operators' scripts.


@pytest.mark.little_of_kernels
def test_scripts_are_told_what_ganetis_are() -> None:
    seen = paths.CONTROL_DIR / "seen"
    add_script("10-env", f"echo call=$1 >>{seen}; env | sort >>{seen}")
    wiring = Vif(
        instance="web1.example.com",
        uuid=NIC,
        mode=Mode.BRIDGED,
        link="br0",
        ips=("192.0.2.10",),
        mac="52:54:00:12:34:56",
        index=1,
        tags=("prod", "web"),
        network={"NETWORK_NAME": "blue", "NETWORK_SUBNET": "192.0.2.0/24"},
    )
    with open_tap(NAME) as tap:
        wire(tap, wiring)
        unwire(tap)
    calls = seen.read_text().split("call=")[1:]
    assert [call.splitlines()[0] for call in calls] == ["pre-up", "up", "pre-down", "down"]
    for call in calls:
        found = dict(line.split("=", 1) for line in call.splitlines()[1:])
        found.pop("PWD", None)
        assert found == {
            "BRIDGE": "br0",
            "INSTANCE": "web1.example.com",
            "INTERFACE": NAME,
            "INTERFACE_INDEX": "1",
            "INTERFACE_UUID": NIC,
            "IP": "192.0.2.10",
            "LANG": "C.UTF-8",
            "LINK": "br0",
            "MAC": "52:54:00:12:34:56",
            "MODE": "bridged",
            "NETWORK_NAME": "blue",
            "NETWORK_SUBNET": "192.0.2.0/24",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "TAGS": "prod web",
        }


@pytest.mark.parametrize("phase", ["pre-up", "up"])
@pytest.mark.little_of_kernels
def test_a_script_that_fails_undoes_the_tap(phase: str) -> None:
    calls = paths.CONTROL_DIR / "calls"
    add_script("10-first", f"echo $1 >>{calls}")
    add_script("20-bad", f"[ $1 != {phase} ] || {{ echo oh no; exit 3; }}")
    with open_tap(NAME) as tap:
        with pytest.raises(ScriptError, match="20-bad .*up: failed with status 3: oh no"):
            wire(tap, WEB)
        assert master() is None
        assert not present().up
    assert records.load_all() == {}
    done = ["pre-up"] if phase == "pre-up" else ["pre-up", "up"]
    assert calls.read_text().split() == [*done, "pre-down", "down"]


def test_a_tap_that_its_qemu_made_persistent_is_replaced() -> None:
    """Any holder of a descriptor can do that."""
    for queues in (1, 2):
        nic = replace(WEB, queues=queues)
        for is_wired in (True, False):
            with open_own_tap(nic) as tap:
                index = present(tap.name).index
                wire(tap, nic)
                tap.set_persistent(True)
                with pytest.raises(TapExistsError, match="an interface of that name") as caught:
                    open_own_tap(nic)
                assert f"brine tap down {tap.name}" in str(caught.value.hint)
            assert present().persistent
            if not is_wired:
                unwire(NAME)
            with open_own_tap(nic):
                assert present().index != index
                assert records.load(NAME) is None
            assert link() is None
    # That of another NIC, or of another program, stays.
    for alias in ("", "brine instance=web2 nic=0"):
        with open_tap(NAME) as tap:
            tap.set_persistent(True)
        with Netlink() as netlink:
            netlink.change(netlink.get(NAME), alias=alias)
        with pytest.raises(TapExistsError):
            open_own_tap(WEB)
        ip(f"link delete {NAME}")


# Taps that stay.


@pytest.mark.little_of_kernels
def test_a_kept_tap_waits_for_its_vm() -> None:
    assert bring_up(WEB).name == NAME
    (entry,) = list_taps()
    assert (entry.name, entry.instance, entry.nic) == (NAME, "web1.example.com", NIC)
    assert (entry.state, entry.mode, entry.link) == (TapState.WAITING, "bridged", "br0")
    assert present().persistent
    assert master() == "br0"
    with open_tap(NAME, reuse=True):
        assert list_taps()[0].state == TapState.OPEN
        assert [holder.process for holder in list_taps()[0].holders] == [os.getpid()]
        assert not bring_up(WEB).changed
        with pytest.raises(TapBusyError, match=f"in use: process {os.getpid()}"):
            take_down(NAME)
    assert take_down(NAME)
    assert link() is None
    assert not take_down(NAME)


@pytest.mark.little_of_kernels
def test_who_may_not_read_its_record_is_not_told_that_it_leads_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bring_up(WEB)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert [entry.state for entry in list_taps()] == [TapState.UNKNOWN]


@pytest.mark.skipif(not shutil.which("qemu-system-x86_64"), reason="there is no QEMU")
@pytest.mark.parametrize("queues", [1, 4])
def test_any_qemu_opens_a_kept_tap_by_its_name(queues: int) -> None:
    bring_up(WEB, queues=queues, user=65534)
    netdev = f"tap,id=n0,ifname={NAME},script=no,downscript=no,queues={queues}"
    options = ["-accel", "tcg", "-nodefaults", "-display", "none", "-S", "-runas", "nobody"]
    qemu = subprocess.Popen(["qemu-system-x86_64", *options, "-netdev", netdev])
    try:
        wait_for("QEMU to open it", lambda: list_taps()[0].state == TapState.OPEN)
        assert list_taps()[0].holders[0].process == qemu.pid
        assert find_leftovers(at_once=True) == []
    finally:
        qemu.kill()
        qemu.wait()
    assert list_taps()[0].state == TapState.WAITING


def test_up_with_more_queues_makes_the_tap_anew() -> None:
    bring_up(WEB)
    bring_up(WEB, queues=2)
    assert present().multi_queue
    assert present().persistent
    assert master() == "br0"
    with open_tap(NAME, queues=2, reuse=True):
        pass
    assert take_down(NAME)


def test_an_ordinary_user_may_be_let_open_it() -> None:
    bring_up(WEB, user=65534, group=65534)
    assert (present().user, present().group) == (65534, 65534)
    assert opens_as_nobody()
    bring_up(WEB)
    assert (present().user, present().group) == (0, None)
    assert not opens_as_nobody()


@pytest.mark.little_of_kernels
def test_a_failing_script_leaves_no_kept_tap() -> None:
    add_script("bad", "[ $1 != up ]")
    before = descriptors()
    with pytest.raises(ScriptError):
        bring_up(WEB)
    assert link() is None
    assert records.load_all() == {}
    assert descriptors() == before
    (paths.NIC_SCRIPTS_DIR / "bad").unlink()
    assert bring_up(WEB).changed


@pytest.mark.little_of_kernels
def test_killed_at_any_moment_the_same_command_ends_right() -> None:
    """A script that waits gives the moments; what was begun dies with the one who began it."""
    for phase in ("pre-up", "up"):
        reached = paths.CONTROL_DIR / phase
        script = add_script("wait", f"[ $1 != {phase} ] || {{ touch {reached}; exec sleep 60; }}")
        child = os.fork()
        if child == 0:
            bring_up(WEB)
            os._exit(0)
        wait_for(f"the script's {phase}", reached.exists)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        # A tap is closed when its last holder is: the script has none of it.
        wait_for("the tap's end", lambda: link() is None)
        assert [one.kind for one in find_leftovers()] == [LeftoverKind.RECORD]
        script.unlink()
        assert bring_up(WEB).changed
        assert master() == "br0"
        assert take_down(NAME)


@pytest.mark.little_of_kernels
def test_a_record_that_its_writer_was_killed_at_is_collected() -> None:
    with open_tap(NAME) as tap:
        wire(tap, WEB)
        (record,) = paths.TAPS_DIR.iterdir()
        unfinished(record).write_text("{")
        with records.one_at_a_time(NAME):
            remove_leftovers()
            assert unfinished(record).exists()  # somebody could be writing it
        remove_leftovers()
        assert list(paths.TAPS_DIR.iterdir()) == [record]
        unfinished(record).write_text("{")
    assert unwire(NAME)
    assert list(paths.TAPS_DIR.iterdir()) == []


@pytest.mark.little_of_kernels
def test_who_works_on_a_tap_is_waited_for_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tap(NAME) as tap, records.one_at_a_time(NAME):
        monkeypatch.setattr(records, "LOCK_TIMEOUT_S", 0.0)
        with pytest.raises(LockedError):
            wire(tap, WEB)


# Leftovers.


@pytest.mark.little_of_kernels
def test_a_kept_tap_that_nobody_opens_is_a_leftover_after_a_while() -> None:
    bring_up(WEB)
    assert find_leftovers() == []
    record = records.load(NAME)
    assert record
    records.save(record, since=time.time() - 61)
    socket = paths.CONTROL_DIR / "web1.example.com.qmp"
    socket.touch()
    assert find_leftovers() == []
    socket.unlink()
    with open_tap(NAME, reuse=True):
        assert remove_leftovers() == []
    (found,) = find_leftovers()
    assert (found.kind, found.name, found.instance) == (LeftoverKind.TAP, NAME, "web1.example.com")
    assert remove_leftovers() == [found]
    assert link() is None
    assert records.load_all() == {}


@pytest.mark.little_of_kernels
def test_a_tap_that_was_open_between_two_looks_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[-1])
    bring_up(WEB)
    record = records.load(NAME)
    assert record
    records.save(record, since=time.time() - 61)

    def look() -> list[str]:
        clock.append(clock[-1] + 400)
        return [one.name for one in remove_leftovers(idle_for_s=600)]

    assert [look(), look()] == [[], []]
    assert find_leftovers(idle_for_s=400) != []
    with open_tap(NAME, reuse=True):  # a VM that is being restarted
        pass
    assert [look(), look(), look()] == [[], [], [NAME]]
    assert link() is None
    assert look() == []
    assert list(paths.TAPS_DIR.iterdir()) == []


@pytest.mark.little_of_kernels
def test_all_takes_new_ones_too_but_never_those_in_use() -> None:
    bring_up(WEB)
    multi = Vif(instance="db", uuid="0", mode=Mode.BRIDGED, link="br0")
    bring_up(multi, queues=2)
    with open_tap(multi.tap_name(), queues=2, reuse=True):
        assert [one.name for one in remove_leftovers(at_once=True)] == [NAME]
    assert [one.name for one in remove_leftovers(at_once=True)] == [multi.tap_name()]


@pytest.mark.little_of_kernels
def test_what_is_not_ours_is_never_a_leftover() -> None:
    ip("tuntap add dev mine mode tap")
    ip("tuntap add dev named mode tap")
    ip("link set named alias brine")
    assert remove_leftovers(at_once=True) == []
    assert link("mine")
    with pytest.raises(TapError, match="none of ours"):
        take_down("mine")


@pytest.mark.little_of_kernels
def test_what_a_dead_vm_leaves_is_undone_with_its_scripts() -> None:
    calls = paths.CONTROL_DIR / "calls"
    with open_tap(NAME) as tap:
        wire(tap, WEB)
        add_script("tell", f"echo $1 >>{calls}")
    assert [one.kind for one in remove_leftovers()] == [LeftoverKind.RECORD]
    # There is no interface to do anything on before it goes.
    assert calls.read_text().split() == ["down"]
    assert find_leftovers() == []


@pytest.mark.little_of_kernels
def test_a_damaged_record_is_named_and_not_taken_for_none(caplog: pytest.LogCaptureFixture) -> None:
    bring_up(WEB)
    (paths.TAPS_DIR / f"{NAME}.json").write_text("{")
    with pytest.raises(records.RecordError, match="damaged"):
        wire(NAME, WEB)
    list_taps()
    assert "damaged" in caplog.text


@pytest.mark.little_of_kernels
def test_a_record_of_another_interface_of_that_name_is_not_its() -> None:
    with open_tap(NAME) as tap:
        wire(tap, WEB)
    with open_tap(NAME):
        assert [entry.name for entry in list_taps()] == [NAME]
        assert [one.kind for one in remove_leftovers()] == [LeftoverKind.RECORD]
        assert link()
