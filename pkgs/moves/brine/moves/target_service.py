"""The process of a move to this node.

The decisions are those of :mod:`brine.moves.target`. Here is what they look at, and how each act is
done. Until the source has said that it has cleared, the process stays and
answers it: its question whether the guest runs may have been lost with the answer.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from brine.common.errors import BrineError, printable
from brine.common.qmp.wire import QmpCommandError, QmpTimeoutError
from brine.common.systemd import ServiceManager
from brine.instance import store
from brine.instance.awaited import has_arrived
from brine.instance.claim_changes import take
from brine.instance.claims import has_seen
from brine.instance.kvm.guest import monitor_of
from brine.instance.messages import tell
from brine.instance.start import start_instance
from brine.moves import arriving, channel, messages, records, target
from brine.moves.belongings import Belonging, keep_belongings, keep_password_place, of_message
from brine.moves.copying import FileServer, checksum_of, copy_key, end_copy, files_by_role
from brine.moves.incoming import Incoming, guest_here
from brine.moves.keys import key_folder_of, qemu_user
from brine.moves.migration import MoveError, QemuGoneError
from brine.moves.move_key import MoveKey
from brine.moves.offered import ReceivedOffer
from brine.moves.records import MoveRecord, MoverStatus
from brine.moves.talk import Listener, Message, Topic
from brine.moves.target import (
    Fate,
    TargetAct,
    TargetGuest,
    TargetMove,
    TargetStep,
    TargetView,
)
from brine.storage.volumes import volume_in
from brine.vm.claim import Claim
from brine.vm.spec import AdminState

log = logging.getLogger(__name__)

CONTINUES_S = 60.0
"""How long a QEMU that can't run the guest that it has is asked to do so."""
_NO_QEMU = "the QEMU that waits for the guest has ended"
_LISTENS_S = 3.0
"""For how long what takes longer keeps others from being heard."""
_POLL_S = 0.2
_RETRY_S = 2.0


def work(record: MoveRecord) -> None:
    """Do what follows, until the record has ended."""
    records.remove_status(record.name)
    with contextlib.closing(TargetWork(record)) as target_work:
        while target_work.step():
            time.sleep(_POLL_S)


class Comparison:
    """What takes long, such as reading all of a disk, in a thread of its own: meanwhile the master
    and the source are answered.

    :param compare: gets a function that raises a :class:`MoveError` once it is cancelled.
    """

    def __init__(self, compare: Callable[[Callable[[], None]], bool]) -> None:
        self._cancelled = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._found = self._pool.submit(compare, self._look)

    def _look(self) -> None:
        if self._cancelled.is_set():
            raise MoveError("the comparison was cancelled")

    def result(self, timeout_s: float) -> bool | None:
        """The result; None if it has none within that time. Raises what *compare* has raised."""
        try:
            return self._found.result(timeout_s)
        except TimeoutError:
            return None

    def cancel(self) -> None:
        """End it, and wait for that."""
        self._cancelled.set()
        self._pool.shutdown()


class TargetWork:
    """The process of a move to this node. What it knows beside the record ends with it.

    :param service: is told when the process listens.
    """

    def __init__(self, record: MoveRecord, service: ServiceManager | None = None) -> None:
        self.record = record
        self._service = service or ServiceManager()
        self._is_ready = False
        self._offer = ReceivedOffer(record.facts["offered"])
        self._units: Mapping[str, str] = record.facts["units"]
        self._key = MoveKey.of(str(record.facts["key"]))
        self._lock = threading.RLock()  # of all acts: messages come in threads of their own
        self._listener: Listener | None = None
        self._port = 0
        self._disks: socket.socket | None = None
        self._files = FileServer(str(record.facts["target_address"]), copy_key(record.name))
        self._awaits_memory = False
        self._is_routed = False
        self._continues_until = 0.0
        self._runs_since: float | None = None  # if this process has set the guest going
        self._is_whole = not self._units
        self._comparison: Comparison | None = None
        self._status = MoverStatus(record.move.id)
        self.name = record.name

    @property
    def move(self) -> TargetMove:
        return self.record.as_target()

    @property
    def incoming(self) -> Incoming:
        """The QEMU that waits for the guest."""
        connect = partial(monitor_of, self.name, of_unit=True)
        return Incoming(self.name, connect, key_folder_of(self.record))

    def close(self) -> None:
        """End what it has open. QEMU keeps what it got."""
        self._end_comparison()
        for one in (self._listener, self._disks, self._files):
            if one:
                one.close()

    def step(self) -> bool:
        """Do what follows by itself; False if the record has ended."""
        with self._lock:
            if not self._look():
                return False
            try:
                if self._fate() is None:
                    self._listen()
                else:  # units that what follows waits for may wait for this one
                    self._be_ready()
                self._go_on()
                self._be_ready()
            except (BrineError, OSError) as error:
                self._failed(error)
            if self._fate() is Fate.TAKE:
                self._listen_again()
            return records.find(self.name) is not None

    def _look(self) -> bool:
        """Read the record again; False if it has ended."""
        found = records.find(self.name)
        if found is None or found.move.id != self.move.id:
            return False
        self.record = found
        return True

    def _go_on(self) -> None:
        if self._fate() is Fate.DROP:
            self._drop()
        elif self._fate() is Fate.TAKE:
            if not self.record.facts.get("arrived"):
                self._take_part(partial(target.go_act, self.move))
        elif not self.move.is_prepared and not self._status.error:
            self._prepare()

    def _fate(self) -> Fate | None:
        found = self.record.facts.get("fate")
        return Fate(found) if found else None

    def _failed(self, error: BrineError | OSError) -> None:
        """A fault of the preparation is final: the master hears of it, and drops the move. What
        follows a drop or the claim is tried until it is done."""
        hint = getattr(error, "hint", None)
        if isinstance(error, QmpTimeoutError) and self._fate() is Fate.TAKE:
            # It may run the guest: nobody but an administrator ends it.
            kill = f"systemctl kill --signal=KILL brine-instance@{self.name}.service"
            hint = f"the guest is this node's, and its QEMU hangs: {kill} has it start anew"
        text = f"{error}; {hint}" if hint else str(error)
        self._warn(text)
        is_final = not self.move.is_prepared and self._fate() is None
        if is_final:
            self._tell(error=text)
        self._be_ready()
        if not is_final:
            time.sleep(_RETRY_S)

    def _warn(self, text: str) -> None:
        """Tell a fault, once, and have the master hear of it."""
        if text != self._status.fault:
            log.warning("%s", printable(text))
        self._tell(fault=text)

    def _be_ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._service.ready(f"takes {self.name} from {self.move.source}")

    def _tell(self, **changes: Any) -> None:
        new = self._status._replace(**changes)
        if new != self._status:
            self._status = new
            records.write_status(self.name, new)

    # The preparation.

    def _prepare(self) -> None:
        """Make all that the guest needs, and have QEMU wait for it."""
        move, offer = self.move, self._offer
        self._tell(asked=TargetStep.PREPARE.value, text="volumes are made")
        spec = arriving.make_volumes(offer, self._units, self._tell_progress)
        arriving.define(spec, move.source)
        arriving.keep_tries(offer)
        if move.is_live and self.record.facts["makes_password"]:
            keep_password_place(spec)
        prepared: dict[str, Any] = {
            "address": self.record.facts["target_address"],
            "port": self._port,
            **self.record.facts["agreement"],
            "machine": None,
            "disks": {one.device_id or one.uuid: {"copies": one.copies} for one in offer.disks},
            "nbd_port": None,
        }
        if move.is_live:
            self._tell(text="QEMU is started")
            if guest_here(self.name) is TargetGuest.NONE:
                arriving.start_waiting(offer, spec)
            if folder := key_folder_of(self.record):
                folder.write(self._key, qemu_user(self.name))
            self.incoming.prepare(offer.bitmaps)
            prepared["nbd_port"] = self._serve()
            machine = self.incoming.facts()
            prepared["machine"] = {**machine._asdict(), "devices": dict(machine.devices)}
        self.record = records.change(
            self.record,
            lambda known: replace(known, is_prepared=True),
            prepared=prepared,
        )
        self._tell(progress=1.0, text="")

    def _tell_progress(self, done: float, text: str) -> None:
        self._tell(progress=round(done, 3), text=text)

    def _listen(self) -> None:
        """Have the source find this process; after a kill, where it was before."""
        if self._listener or self._fate() is Fate.DROP:
            return
        facts = self.record.facts
        address, known = str(facts["target_address"]), facts.get("prepared") or {}
        opened = channel.listen(address, int(known.get("port") or 0))
        self._port = opened.getsockname()[1]
        self._listener = Listener(opened, self._key, self.told, self._take_memory)

    def _listen_again(self) -> None:
        """Have the source find this process if it can: the guest runs here without that."""
        try:
            self._listen()
        except (BrineError, OSError) as error:
            self._warn(str(error))

    def _serve(self, port: int = 0) -> int | None:
        """Have the source's QEMU reach the volumes, once it has told from where; returns the port,
        None if none is copied."""
        device_ids = [one.device_id for one in self._offer.copied()]
        if not device_ids:
            return None
        incoming = self.incoming
        incoming.stop_serving()  # what was begun before a kill
        if self._disks:
            self._disks.close()
        address = str(self.record.facts["target_address"])
        self._disks = channel.listen(address, port, callers=[])
        incoming.serve_disks(self._disks, device_ids)
        return int(self._disks.getsockname()[1])

    # What the source says.

    def _take_memory(self, connection: socket.socket) -> None:
        with self._lock:
            if not (self._awaits_memory and self._look() and self._fate() is None):
                raise MoveError(f"{self.name}: no guest is to come now")
            self._awaits_memory = False
            self.incoming.receive(connection)

    def told(self, message: Message) -> Message:
        """Do what the source says, and answer it."""
        try:
            topic = Topic(message.get("told", ""))
        except ValueError:
            raise MoveError(f"{self.name}: a message that is not known here") from None
        doing: dict[Topic, Callable[[Message], Message]] = {
            Topic.ADMIT: self._admit,
            Topic.BRING: self._keep,
            Topic.RECEIVE: self._expect,
            Topic.COPY: self._take_file,
            Topic.COPIED: self._compare,
            Topic.HOLD: self._hold,
            Topic.GO: self._go,
            Topic.LEAVE: self._leave,
            Topic.CLEARED: self._forget,
        }
        with self._lock:
            if topic not in doing or not self._look():
                return {"word": "refused", "error": "no such move is prepared here"}
            return doing[topic](message)

    def _admit(self, message: Message) -> Message:
        """Let connections for disks in. The listener of a process that was killed is QEMU's alone,
        and is exchanged."""
        if self._fate() is not None or not self.move.is_prepared:
            return {"word": "refused", "error": "no disks are taken now"}
        callers = [(str(address), int(port)) for address, port in message["ports"]]
        if self._disks is None:
            self._serve(int(self.record.facts["prepared"]["nbd_port"] or 0))
        if self._disks:
            channel.admit(self._disks, callers)
        return {"word": "done"}

    def _keep(self, message: Message) -> Message:
        """Keep what comes along. The QEMU that waits for the guest gets its password of VNC."""
        facts = self.record.facts
        if self._fate() is not None or not self.move.is_prepared:
            return {"word": "refused", "error": "nothing comes along now"}
        try:
            found = of_message(message["files"])
        except MoveError as error:
            return {"word": "refused", "error": str(error)}
        if missing := self._offer.comes_along - {Belonging.CONSOLE_LOG} - found.keys():
            return {"word": "refused", "error": f"what does not come along: {min(missing)}"}
        makes_password = bool(facts.get("makes_password"))
        keep_belongings(store.load(self.name), found, makes_password=makes_password)
        password = found.get(Belonging.VNC_PASSWORD)
        if password and makes_password and self.move.is_live:
            if guest_here(self.name) is not TargetGuest.INCOMING:
                return {"word": "refused", "error": _NO_QEMU}
            with monitor_of(self.name, of_unit=True) as qmp:
                told = {"protocol": "vnc", "password": password.decode()}
                with contextlib.suppress(QmpCommandError):  # it was started without VNC
                    qmp.execute("set_password", told)
        self.record = records.change(self.record, has_belongings=True)
        return {"word": "held"}

    def _expect(self, _message: Message) -> Message:
        if self._fate() is not None or guest_here(self.name) is not TargetGuest.INCOMING:
            return {"word": "refused", "error": _NO_QEMU}
        self._awaits_memory = True
        return {"word": "done"}

    def _take_file(self, message: Message) -> Message:
        """Have the source write a file of a disk, of a guest that is off."""
        if self._fate() is not None or self.move.is_live or not self.move.is_prepared:
            return {"word": "refused", "error": "no disks are taken now"}
        self._end_comparison()  # of what a source that was killed has sent
        path = self._copied_files().get(str(message["disk"]), {}).get(str(message["role"]))
        if path is None:
            return {"word": "refused", "error": "no such file of a disk is prepared here"}
        self.record = records.change(
            self.record, whole=False
        )  # a source that was killed begins anew
        copy_key(self.name).write(self._key)
        port, is_zero = self._files.serve(path, int(message["size"]))
        return {"word": "done", "port": port, "is_zero": is_zero}

    def _compare(self, message: Message) -> Message:
        """Compare the copies with what the source has. They are closed from then on."""
        if self._fate() is Fate.DROP or self.move.is_live or not self.move.is_prepared:
            return {"word": "refused", "error": "no disks are taken now"}
        if self.record.facts.get("whole"):
            return {"word": "whole"}
        if self._comparison is None:
            self._files.close()
            self._comparison = Comparison(partial(self._are_whole, message["disks"]))
        try:
            is_whole = self._comparison.result(_LISTENS_S)
        except BrineError:
            self._end_comparison()
            raise
        if is_whole is None:
            return {"word": "wait"}
        self._end_comparison()
        if not is_whole:
            return {"word": "differs"}
        copy_key(self.name).remove()
        self.record = records.change(self.record, whole=True)
        return {"word": "whole"}

    def _end_comparison(self) -> None:
        if self._comparison:
            self._comparison.cancel()
        self._comparison = None

    def _are_whole(self, told: Message, look: Callable[[], None]) -> bool:
        """Whether the copies are what the source tells of its files.

        :param look: raises an error once nobody wants to know that any more.
        """
        files = self._copied_files()
        if {uuid: {*roles} for uuid, roles in files.items()} != {
            uuid: {*roles} for uuid, roles in told.items()
        }:
            return False
        for uuid, roles in files.items():
            for role, path in roles.items():
                size = int(told[uuid][role]["size_bytes"])
                end_copy(path, size)
                if checksum_of(path, size=size, look=look) != told[uuid][role]["sha256"]:
                    return False
        return True

    def _copied_files(self) -> dict[str, dict[str, str]]:
        """The files and devices of this node's volumes by their role, by the UUID of the disk."""
        return {
            uuid: {role: file.path for role, file in files_by_role(volume_in(unit, uuid)).items()}
            for uuid, unit in self._units.items()
        }

    def _hold(self, _message: Message) -> Message:
        if self._fate() is Fate.DROP:
            return {"word": "refused", "error": "the move is dropped here"}
        if self._offer.comes_along and not self.record.facts.get("has_belongings"):
            return {"word": "refused", "error": "what comes along has not come"}
        return self._take_part(partial(target.hold_act, self.move))

    def _go(self, message: Message) -> Message:
        if int(message.get("serial", 0)) != self.move.serial:
            return {"word": "refused", "error": "that is not the claim of this move"}
        if not self.move.is_prepared:
            return {"word": "refused", "error": "no such move is prepared here"}
        if records.decided(self.record, Fate.TAKE) is not Fate.TAKE:
            return {"word": "refused", "error": "the move is dropped here"}
        self._look()
        return self._take_part(partial(target.go_act, self.move))

    def _take_part(self, decide: Callable[[TargetView], target.TargetDecision]) -> Message:
        """Do one act after another until there is an answer."""
        while True:
            if self.record.facts.get("arrived"):
                return {"word": "runs", "ran_ms": self._ran_ms()}
            act, error = decide(self.view())
            if act is TargetAct.REFUSE:
                return {"word": "refused", "error": error}
            if act is TargetAct.ANSWER_WAIT:
                return {"word": "wait"}
            self._do(act)
            if act is TargetAct.SYNC:
                return {"word": "held"}

    def _leave(self, _message: Message) -> Message:
        """The guest stays where it is, durably. A QEMU that waits here may hold up the source's."""
        if self._fate() is Fate.TAKE:
            return {"word": "refused", "error": "this node has the claim"}
        if self.move.is_live:
            self._end_qemu()
        return {"word": "done"}

    def _forget(self, _message: Message) -> Message:
        """The source has nothing of the instance any more, and asks no more."""
        if self.record.facts.get("arrived"):
            records.end(self.record)
            return {"word": "done"}
        return {"word": "wait"}

    # What it sees, and does.

    def view(self) -> TargetView:
        """What there is to see now."""
        move = self.move
        guest = guest_here(self.name)
        can_serve = guest in (TargetGuest.INCOMING, TargetGuest.COMPLETE)
        return TargetView(
            guest,
            is_taken=has_seen(self.name, self.record.uuid, move.serial),
            is_ended=False,
            is_open=self._files.is_open or (can_serve and move.copies and self.incoming.serves()),
            is_whole=self._is_whole or bool(self.record.facts.get("whole")),
        )

    def _do(self, act: TargetAct) -> None:
        doing: dict[TargetAct, Callable[[], object]] = {
            TargetAct.CLOSE: self._close_disks,
            TargetAct.SYNC: self._sync,
            TargetAct.TAKE: self._take,
            TargetAct.CONTINUE: self._continue,
            TargetAct.START: self._start,
            TargetAct.END: self._arrived,
        }
        doing[act]()

    def _close_disks(self) -> None:
        self._files.close()
        if self.move.is_live:
            self.incoming.stop_serving()
        if self._disks:
            self._disks.close()
            self._disks = None

    def _sync(self) -> None:
        if not self.move.copies:
            return
        with arriving.synced(store.load(self.name), self._units):
            if self.move.is_live:
                self.incoming.flush()
            else:
                arriving.settle_copies(self._units)

    def _take(self) -> None:
        """Take the claim, durably."""
        take(self.name, Claim(str(self.record.facts["target"]), self.move.serial))

    def _continue(self) -> None:
        arriving.route(self.name)
        self._is_routed = True
        has_arrived(self.name)
        try:
            self.incoming.go()
        except QemuGoneError:
            raise
        except MoveError as error:
            now = time.monotonic()
            self._continues_until = self._continues_until or now + CONTINUES_S
            if now < self._continues_until:
                raise
            log.warning("%s; its memory is given up, and it is started anew", printable(str(error)))
            self._start()
            return
        self._runs_since = time.monotonic()
        arriving.announce_routes(self.name)

    def _ran_ms(self) -> int:
        """For how long the guest has run here; 0 if that is not known."""
        return round(1000 * (time.monotonic() - self._runs_since)) if self._runs_since else 0

    def _start(self) -> None:
        """As after any loss of power. From then on it is like any instance of this node's: others
        see to one that has not started."""
        # Before others are let in: what they start is not to be ended.
        if guest_here(self.name) in (TargetGuest.INCOMING, TargetGuest.COMPLETE):
            self._end_qemu()
        self.record = records.change(self.record, keeps_out="")
        if store.load(self.name).admin_state == AdminState.UP:
            try:
                start_instance(self.name, keeps_tries=True)
            except BrineError as error:
                log.warning("%s", printable(str(error)))
        self._arrived()

    def _arrived(self) -> None:
        """The guest runs here, or is off as it should be."""
        if self.record.facts.get("arrived"):
            return
        if not self._is_routed and guest_here(self.name) is TargetGuest.RUNS:
            # A process that was killed may not have; or the guest stands still by a fault.
            arriving.route(self.name)
            has_arrived(self.name)
            if self.move.is_live:
                self.incoming.stop_serving()
        if folder := key_folder_of(self.record):
            folder.remove()
        self.record = records.change(self.record, keeps_out="", arrived=True)
        tell(messages.MOVED_HERE, self.name, node=self.move.source, serial=self.move.serial)

    def _end_qemu(self) -> None:
        try:
            self.incoming.quit()
        except QemuGoneError:
            pass
        except BrineError as error:  # such as of one that hangs: its unit ends it
            log.warning("%s", printable(str(error)))
        arriving.await_unit_down(self.name)

    def _drop(self) -> None:
        """Remove all that was made for the move."""
        self._end_comparison()
        self._files.close()
        copy_key(self.name).remove()
        if self.move.is_live:
            self._end_qemu()
        if folder := key_folder_of(self.record):
            folder.remove()
        made_password = bool(self.record.facts.get("makes_password"))
        arriving.remove_all(self._offer, self._units, made_password=made_password)
        records.end(self.record)
        tell(messages.MOVE_DROPPED, self.name, node=self.move.source)
