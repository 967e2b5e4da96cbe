"""A node of a simulated cluster: what it keeps, what it loses with its power, and the process that
takes part in moves, with the decisions of :mod:`brine.moves`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from brine.cluster.moves import MoveStep
from brine.common.operation import AnswerState, Facts, StepAnswer
from brine.moves import source, target
from brine.moves.source import (
    FirstAct,
    SourceAct,
    SourceAnswer,
    SourceMove,
    SourceStep,
    SourceView,
    TargetWord,
)
from brine.moves.talk import Topic
from brine.moves.target import (
    TargetAct,
    TargetMove,
    TargetStep,
    TargetView,
)
from brine.vm.claim import UNCLAIMED, Claim
from simulator.machines import Qemu, Volume
from simulator.world import Process, World

_POLL_S = 0.4
_PATIENCE_S = 8.0
_WATCH_S = 6.0

Reply = Callable[[StepAnswer], object]


@dataclass(frozen=True)
class Message:
    """What the source tells the target; *content* is what stands for checksums."""

    move_id: str
    told: Topic
    instance: str
    serial: int
    content: frozenset[int] | None = None
    reply: Callable[[TargetWord], object] = field(default=lambda _: None)


_WORDS = {
    TargetAct.REFUSE: TargetWord.REFUSED,
    TargetAct.ANSWER_WAIT: TargetWord.WAIT,
    TargetAct.ANSWER_RUNS: TargetWord.RUNS,
    TargetAct.SYNC: TargetWord.HELD,
}


@dataclass(frozen=True)
class Instance:
    """What the simulated instances differ in.

    :param volume: that all nodes have; None if each has its own.
    :param runs: its admin_state is up.
    """

    name: str
    volume: Volume | None
    runs: bool
    writes: Callable[[], int]


@dataclass
class Durable:
    """What a node has on its disk. Each change is whole, and synced."""

    specs: set[str] = field(default_factory=set)
    claims: dict[str, Claim] = field(default_factory=dict)
    sources: dict[str, SourceMove] = field(default_factory=dict)
    targets: dict[str, TargetMove] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    last_runs: dict[str, str] = field(default_factory=dict)
    configuration: dict[str, Claim] = field(default_factory=dict)


class SimNode:
    """A node. Its guests live on when the process that moves them is killed."""

    def __init__(self, world: World, name: str, instances: dict[str, Instance]) -> None:
        self.world, self.name, self.instances = world, name, instances
        self.nodes: dict[str, SimNode] = {}
        self.disk = Durable()
        self.volumes: dict[str, Volume] = {}
        self.qemus: dict[str, Qemu] = {}
        self.is_up = True
        self.process = Process(world, name)
        self._forget()
        self._watch()

    def _forget(self) -> None:
        """What the process knows ends with it."""
        self.words: dict[str, TargetWord] = {}
        self.down_since: dict[str, float] = {}
        self.copying: set[str] = set()
        self.copied: set[str] = set()
        self.busy: set[str] = set()
        self.unasked: set[str] = set()

    # Kills.

    def kill_process(self) -> None:
        self.process.kill()
        self._forget()

    def start_process(self) -> None:
        if self.is_up and not self.process.is_up:
            self.process.start()
            self._watch()
            self._resume()

    def kill_qemu(self, instance: str) -> None:
        if qemu := self.qemu(instance):
            qemu.kill()

    def lose_power(self) -> None:
        self.is_up = False
        self.kill_process()
        for qemu in self.qemus.values():
            qemu.kill()
        self.qemus.clear()
        for volume in self.volumes.values():
            volume.lose_power()

    def boot(self) -> None:
        """It asks first; until it is answered, it starts what no other node has the disks of."""
        if self.is_up:
            return
        self.is_up = True
        self.unasked = set(self.disk.specs)
        unasked = self.unasked
        self.start_process()
        self.unasked = unasked
        for name in sorted(unasked):
            if not self.instances[name].volume:
                self.watch_over(name)
        self._ask()

    def _ask(self) -> None:
        """Ask another node's confd, which may be late with the configuration."""
        if not self.unasked:
            return
        peer = self.world.random.choice([one for one in self.nodes.values() if one is not self])
        answer = peer.answer_claims
        self.world.send(self.name, peer.name, lambda: answer(self), label="boot question")
        self.process.later(3, self._ask)

    def answer_claims(self, node: SimNode) -> None:
        known = dict(self.disk.configuration)
        self.world.send(self.name, node.name, node.take_answer, known, label="boot answer")

    def take_answer(self, known: dict[str, Claim]) -> None:
        for name, claim in known.items():
            self.define(name, claim)
        self.unasked = set()

    def define(self, name: str, claim: Claim) -> None:
        """The configuration has this claim: an older one changes nothing."""
        if name in self.disk.claims and claim.serial > self.disk.claims[name].serial:
            self.disk.claims[name] = claim

    # Instances.

    def qemu(self, instance: str) -> Qemu | None:
        qemu = self.qemus.get(instance)
        return qemu if qemu and qemu.is_alive else None

    def may_run(self, instance: str) -> bool:
        claim = self.disk.claims.get(instance, UNCLAIMED)
        return instance in self.disk.specs and not claim.fault(UNCLAIMED, self.name.__eq__)

    def start(self, instance: str) -> None:
        """Start it, unless it runs, or the claim says no. All starts pass this."""
        if self.is_up and self.may_run(instance) and not self.qemu(instance):
            qemu = self._new_qemu(instance)
            self.disk.last_runs[instance] = qemu.run
            qemu.resume()

    def _new_qemu(self, name: str) -> Qemu:
        instance = self.instances[name]
        volume = instance.volume or self.volumes.setdefault(name, Volume())
        qemu = self.qemus[name] = Qemu(self.world, self.name, name, volume, instance.writes)
        return qemu

    def _watch(self) -> None:
        """The watcher, again and again."""
        for name in sorted(self.disk.specs - self.unasked):
            self.watch_over(name)
        self.process.later(_WATCH_S, self._watch)

    def watch_over(self, name: str) -> None:
        moves = self.disk.sources.values()
        if self.instances[name].runs and not any(
            move.instance == name and move.keeps_off() for move in moves
        ):
            self.start(name)

    # The process that moves instances.

    def _resume(self) -> None:
        for move in list(self.disk.sources.values()):
            self._work_later(move.id)
        for one in list(self.disk.targets.values()):
            if self._has_seen(one.instance, one.serial):  # the claim is taken
                message = Message(one.id, Topic.GO, one.instance, one.serial)
                self.process.later(0.01, self.told, message, label="target")

    def asked(self, move_id: str, step_id: str, step: str, facts: Facts, reply: Reply) -> None:
        """The master asks for a step."""
        found: Facts = {}
        if step == MoveStep.OFFER:
            answer, found = self._offer(facts)
        elif step in list(TargetStep):
            answer = self._target_step(move_id, TargetStep(step), facts)
        else:
            answer = self._source_step(move_id, SourceStep(step), facts)
        reply(StepAnswer(step_id, step, answer.state, error=answer.error, found=found))

    def _has_ended(self, instance: str, move_id: str) -> bool:
        return self.disk.ended.get(instance, "") >= move_id

    def _has_seen(self, instance: str, serial: int) -> bool:
        return self.disk.claims.get(instance, UNCLAIMED).serial >= serial

    # The source.

    def _offer(self, facts: Facts) -> tuple[SourceAnswer, Facts]:
        """What would move; this begins nothing."""
        name = facts["instance"]
        if not self.may_run(name):
            return SourceAnswer(AnswerState.FAILED, "the instance is not this node's"), {}
        runs = self.qemu(name) is not None
        found = {
            "runs": runs,
            "live": runs and not facts["cold"],
            "copies": self.instances[name].volume is None,
            "run": self._run_of(name),
        }
        return SourceAnswer(AnswerState.DONE), found

    def _run_of(self, name: str) -> str:
        return self.disk.last_runs.get(name, "") if self.qemu(name) else ""

    def _source_step(self, move_id: str, step: SourceStep, facts: Facts) -> SourceAnswer:
        name = facts["instance"]
        move = self.disk.sources.get(move_id)
        if move is None:
            act, answer = source.source_without_record(
                step,
                is_given=self._has_seen(name, facts["serial"]),
                is_ended=self._has_ended(name, move_id),
            )
            if act is FirstAct.END:
                self.disk.ended[name] = move_id
            if act is FirstAct.BEGIN:
                return self._begin_source(move_id, step, facts)
            return answer
        move = self.disk.sources[move_id] = move.asked_for(step)
        self._work_later(move_id)
        view = self._source_view(move)
        return source.source_answer(step, move, view, source.source_act(move, view).act)

    def _begin_source(self, move_id: str, step: SourceStep, facts: Facts) -> SourceAnswer:
        name, known = facts["instance"], {key: facts[key] for key in ("is_live", "copies")}
        if not self.may_run(name):
            return SourceAnswer(AnswerState.FAILED, "the instance is not this node's")
        if facts["run"] != self._run_of(name):
            return SourceAnswer(AnswerState.FAILED, "it is not what was offered")
        self.disk.sources[move_id] = SourceMove(
            move_id,
            name,
            facts["target"],
            facts["serial"],
            **known,
            run=self.disk.last_runs.get(name, ""),
            runs=self.qemu(name) is not None,
            asked=step,
        )
        self._work_later(move_id)
        return SourceAnswer(AnswerState.RUNNING)

    def _source_view(self, move: SourceMove) -> SourceView:
        qemu = self.qemu(move.instance)
        guest = source.source_guest(
            move,
            run=self.disk.last_runs.get(move.instance, ""),
            status=qemu.status if qemu else "",
            migration=qemu.migration if qemu else "",
        )
        claim = self.disk.claims[move.instance]
        since = self.down_since.get(move.id, self.world.now)
        return SourceView(
            guest,
            is_given=claim.node != self.name,
            is_copied=move.id in self.copied or bool(qemu and qemu.mirror_is_ready),
            has_mirrors=bool(qemu and qemu.mirror_to),
            word=self.words.get(move.id, TargetWord.NONE),
            is_late=self.world.now - since > _PATIENCE_S,
        )

    def _work_later(self, move_id: str) -> None:
        if move_id not in self.busy:
            self.busy.add(move_id)
            self.process.later(0.01, self._work, move_id, label="source")

    def _work(self, move_id: str) -> None:
        """Do the next act of a move."""
        self.busy.discard(move_id)
        move = self.disk.sources.get(move_id)
        if move is None:
            return
        act, error = source.source_act(move, self._source_view(move))
        if act is SourceAct.NOTHING:
            return
        doing = {
            SourceAct.STOP: self._stop,
            SourceAct.COPY: self._copy,
            SourceAct.SEND: self._send,
            SourceAct.SWITCH: self._switch,
            SourceAct.ASK: self._ask_target,
            SourceAct.GIVE: self._give,
            SourceAct.GO: self._go,
            SourceAct.CLEAR: self._clear,
            SourceAct.RESUME: self._run_on,
            SourceAct.END: self._end_source,
        }.get(act)
        if act is SourceAct.FAIL:
            self._fail(move, error)
        elif doing:
            doing(move)
        is_polled = act in (SourceAct.WAIT, SourceAct.ASK, SourceAct.GO, SourceAct.COPY)
        self.busy.add(move_id)
        delay, label = (_POLL_S, "poll") if is_polled else (0.01, "source")
        self.process.later(delay, self._work, move_id, label=label)

    def _fail(self, move: SourceMove, error: str) -> None:
        self.disk.sources[move.id] = replace(move, error=error)

    def _stop(self, move: SourceMove) -> None:
        self.kill_qemu(move.instance)

    def _copy(self, move: SourceMove) -> None:
        peer = self.nodes[move.target]
        if move.is_live:
            qemu = self.qemus[move.instance]
            if not qemu.mirror_to and not qemu.begin_mirror(peer.qemu(move.instance)):
                self._fail(move, "the mirror did not begin")
        elif move.id not in self.copying:
            self.copying.add(move.id)
            delay = self.world.between(0.5, 2)
            self.process.later(delay, self._copied, move, label="copied")

    def _copied(self, move: SourceMove) -> None:
        self.copying.discard(move.id)
        peer, volume = self.nodes[move.target], self.volumes.get(move.instance)
        copy = peer.volumes.get(move.instance)
        is_reached = peer.is_up and self.world.connected(self.name, peer.name)
        if is_reached and copy and volume and copy.fill(volume.cached):
            self.copied.add(move.id)

    def _send(self, move: SourceMove) -> None:
        if move.has_sent:
            self.qemus[move.instance].send(self.nodes[move.target].qemu(move.instance))
        else:
            self.disk.sources[move.id] = replace(move, has_sent=True)

    def _switch(self, move: SourceMove) -> None:
        qemu = self.qemus[move.instance]
        qemu.end_mirror()
        self.process.later(0.001, qemu.go_on, label="continue")

    def _ask_target(self, move: SourceMove) -> None:
        self.down_since.setdefault(move.id, self.world.now)
        self._tell(move, Topic.HOLD)

    def _go(self, move: SourceMove) -> None:
        self._tell(move, Topic.GO)

    def _tell(self, move: SourceMove, told: Topic) -> None:
        peer, content = self.nodes[move.target], None
        if move.copies and not move.is_live and told is Topic.HOLD:
            content = frozenset(self.volumes[move.instance].cached)

        def reply(word: TargetWord) -> None:
            self.world.send(peer.name, self.name, self.hear, move.id, word, label=word.name)

        message = Message(move.id, told, move.instance, move.serial, content, reply)
        self.world.send(self.name, peer.name, peer.told, message, label=told)

    def hear(self, move_id: str, word: TargetWord) -> None:
        """The target answers; it may be late."""
        self.words[move_id] = word

    def _give(self, move: SourceMove) -> None:
        self.disk.claims[move.instance] = Claim(move.target, move.serial)

    def _clear(self, move: SourceMove) -> None:
        self.kill_qemu(move.instance)
        if move.copies:
            self.volumes.pop(move.instance, None)
        self.disk.specs.discard(move.instance)
        self._end_source(move)

    def _run_on(self, move: SourceMove) -> None:
        qemu = self.qemu(move.instance)
        if qemu is None:
            self.start(move.instance)
            return
        qemu.end_mirror()
        qemu.cancel()
        if qemu.status == "postmigrate":
            qemu.resume()

    def _end_source(self, move: SourceMove) -> None:
        del self.disk.sources[move.id]
        self.disk.ended[move.instance] = move.id

    # The target.

    def _target_view(
        self, move_id: str, name: str, serial: int, content: frozenset[int] | None = None
    ) -> TargetView:
        qemu = self.qemu(name)
        volume = self.volumes.get(name)
        return TargetView(
            target.target_guest(qemu.status if qemu else ""),
            is_taken=self._has_seen(name, serial),
            is_ended=self._has_ended(name, move_id),
            is_open=volume is not None and volume.is_open,
            is_whole=content is None or (volume is not None and volume.cached == content),
        )

    def _target_step(self, move_id: str, step: TargetStep, facts: Facts) -> SourceAnswer:
        name, move = facts["instance"], self.disk.targets.get(move_id)
        view = self._target_view(move_id, name, facts["serial"])
        decide = target.prepare_act if step is TargetStep.PREPARE else target.drop_act
        act, error = decide(move, view)
        if act is TargetAct.REFUSE:
            return SourceAnswer(AnswerState.FAILED, error)
        if act is TargetAct.ANSWER_DONE:
            return SourceAnswer(AnswerState.DONE)
        if act is TargetAct.PREPARE:
            self._prepare(move_id, move, facts)
        else:
            self._drop(move_id, move, name)
        return SourceAnswer(AnswerState.RUNNING)

    def _prepare(self, move_id: str, move: TargetMove | None, facts: Facts) -> None:
        name = facts["instance"]
        if move is None:
            known = {key: facts[key] for key in ("source", "serial", "is_live", "copies", "runs")}
            self.disk.targets[move_id] = TargetMove(move_id, name, **known)
            return
        if move.copies:
            self.volumes.setdefault(name, Volume()).is_open = True
        if move.is_live and not self.qemu(name):
            self._new_qemu(name)
        self.disk.targets[move_id] = replace(move, is_prepared=True)

    def _drop(self, move_id: str, move: TargetMove | None, name: str) -> None:
        if move:
            self.kill_qemu(name)
            if move.copies:
                self.volumes.pop(name, None)
            del self.disk.targets[move_id]
        self.disk.ended[name] = move_id

    def told(self, message: Message) -> None:
        """The source asks whether all is held, or says that the claim is given. Do one act after
        another until that is answered."""
        name, move = message.instance, self.disk.targets.get(message.move_id)
        view = self._target_view(message.move_id, name, message.serial, message.content)
        decide = target.hold_act if message.told is Topic.HOLD else target.go_act
        act = decide(move, view).act
        if move:
            self._do(act, move)
        if word := _WORDS.get(act):
            message.reply(word)
        else:
            self.process.later(0.01, self.told, message, label="target")

    def _do(self, act: TargetAct, move: TargetMove) -> None:
        name = move.instance
        if act is TargetAct.CLOSE:
            self.volumes[name].is_open = False
        elif act is TargetAct.SYNC and move.copies:
            self.volumes[name].sync()
        elif act is TargetAct.TAKE:
            self.disk.claims[name] = Claim(self.name, move.serial)
            self.disk.specs.add(name)
        elif act is TargetAct.CONTINUE:
            qemu = self.qemus[name]
            self.disk.last_runs[name] = qemu.run
            qemu.resume()
        elif act is TargetAct.START:
            self.kill_qemu(name)
            self.start(name)
        elif act is TargetAct.END:
            del self.disk.targets[move.id]
            self.disk.ended[name] = move.id
