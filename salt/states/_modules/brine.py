"""
Brine: the virtual machines of a node, and what its cluster knows
=================================================================

::

    salt kvm1 brine.list
    salt kvm1 brine.start web1
    salt kvm1 brine.nic_add web1 link=br0
    salt '*' brine.verdicts since=1h

Each function runs one ``brine ... --json`` on the minion, and returns what that prints; its manual,
such as brine-instance(1), has the meaning. Options of a command are arguments by name: ``--mtu
9000`` is ``mtu=9000``, ``--no-hotplug`` is ``no_hotplug=True``, and an option that may be repeated
takes a list. Where the command fails, so does the function, in one line.

The module talks to the ``brine`` command only: Salt's own packages have a Python that does not see
the distribution's modules.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from salt.exceptions import CommandExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    __context__: dict[str, Any] = {}
    __salt__: dict[str, Callable[..., Any]] = {}

__func_alias__ = {"list_": "list"}

log = logging.getLogger(__name__)


def ask(*command: str, stdin: Any = "") -> dict[str, Any]:
    """Run ``brine`` with ``--json``. For states, which must not end in a traceback.

    :param stdin: a text; or data, which becomes JSON. Keys that are no strings, and values that
        JSON lacks, are refused: YAML has them where quotes are missing.

    Returns ``said``, what it printed, and ``refused``, one line, if it failed; some commands print
    JSON and fail, too. Neither the input nor the environment is logged, or told.

    CLI Example::

        salt kvm1 brine.ask instance list
    """
    line = ["brine", *map(str, command), "--json"]
    if not isinstance(stdin, str):
        if unfit := next(_unfit(stdin, ""), ""):
            return {"refused": unfit}
        stdin = json.dumps(stdin, default=_plain)
    try:
        # Quiet: what is declared may hold secrets. Raw: Salt would make newlines of JSON's \n.
        run = __salt__["cmd.run_all"](
            line,
            stdin=stdin,
            stdin_raw_newlines=True,
            python_shell=False,
            output_loglevel="quiet",
            ignore_retcode=True,
        )
    except Exception as error:
        # Salt's error also has the input and the environment.
        _, is_given, reason = str(error).rpartition(", reason: ")
        return {"refused": f"brine can't be run: {reason if is_given else type(error).__name__}"}
    try:
        answer = {"said": json.loads(run["stdout"])}
    except ValueError:
        answer = {}
    if run["retcode"] != 0:
        lines = [one.strip().removeprefix("brine: hint: ") for one in run["stderr"].splitlines()]
        failed = f"{' '.join(line)} failed with status {run['retcode']}"
        answer["refused"] = "; ".join(filter(None, lines)) or failed
    elif not answer:
        answer["refused"] = f"{' '.join(line)} succeeded, but did not print JSON"
    return answer


def _unfit(data: Any, where: str) -> Iterator[str]:
    """What of data can't be in JSON, with its JSON pointer. No text of the data is told but keys,
    as it may be a secret."""
    if isinstance(data, Mapping):
        for key, inner in data.items():
            place = f"{where}/{str(key).replace('~', '~0').replace('/', '~1')}"
            if not isinstance(key, str):
                yield f"{place}: a key must be a string: put it in quotes"
            yield from _unfit(inner, place)
    elif isinstance(data, Sequence) and not isinstance(data, (str, bytes, bytearray)):
        for index, inner in enumerate(data):
            yield from _unfit(inner, f"{where}/{index}")
    elif not (data is None or isinstance(data, (str, bool, int, float))):
        yield f"{where or '/'}: is a {type(data).__name__}, which JSON lacks: put it in quotes"


def _plain(value: Any) -> Any:
    """A value as JSON has it: Salt has mappings and lists of its own."""
    return dict(value) if isinstance(value, Mapping) else list(value)


def health() -> dict[str, Any]:
    """
    Tell what ``salt-run brine.health`` asks of a node: its grains of Brine, its ``instances``, its
    ``outbox``, and the ``serial`` of its configuration; each of the last three as ``brine.ask``
    returns it.

    This is one function, as Salt applies no states beside a job of several functions.

    CLI Example::

        salt kvm1 brine.health
    """
    return {
        "grains": __salt__["grains.get"]("brine"),
        "instances": ask("instance", "list"),
        "outbox": ask("outbox", "list"),
        "serial": ask("config", "show", "/cluster/serial_no"),
    }


def list_() -> Any:
    """
    List the instances with their states, specs, and what the watcher holds back.

    CLI Example::

        salt kvm1 brine.list
    """
    return _said("instance", "list")


def info(name: str) -> Any:
    """
    Show what is known of an instance.

    CLI Example::

        salt kvm1 brine.info web1
    """
    return _said("instance", "info", name)


def start(*names: str, keep_tries: bool = False) -> Any:
    """
    Start instances, and set their admin_state to up.

    CLI Example::

        salt kvm1 brine.start web1 db1
    """
    return _said("instance", "start", *names, *_options({"keep_tries": keep_tries}))


def stop(*names: str, force: bool = False, timeout: float | None = None) -> Any:
    """
    Shut down the guests of instances side by side, and set their admin_state to down.

    CLI Example::

        salt kvm1 brine.stop web1 db1
        salt kvm1 brine.stop web1 force=True timeout=30
    """
    return _said("instance", "stop", *names, *_options({"force": force, "timeout": timeout}))


def reboot(
    name: str, force: bool = False, timeout: float | None = None, reset: bool = False
) -> Any:
    """
    Shut down the guest of an instance, and start it with its present spec.

    CLI Example::

        salt kvm1 brine.reboot web1
        salt kvm1 brine.reboot web1 reset=True
    """
    options = _options({"force": force, "timeout": timeout, "reset": reset})
    return _said("instance", "reboot", name, *options)


def define(spec: Any, live: bool = False, test: bool = False) -> Any:
    """
    Define an instance, or several: a spec, brine-spec(5), or a list of specs.

    CLI Example::

        salt kvm1 brine.define '{name: web1, memory_mib: 2048, nics: [{link: br0}]}' live=True
    """
    options = _options({"live": live, "dry_run": test})
    return _said("instance", "define", "-", *options, stdin=spec)


def undefine(name: str) -> Any:
    """
    Forget an instance that does not run. Its disks stay.

    CLI Example::

        salt kvm1 brine.undefine web1
    """
    return _said("instance", "undefine", name)


def nic_list(name: str) -> Any:
    """
    List the NICs of a running instance.

    CLI Example::

        salt kvm1 brine.nic_list web1
    """
    return _said("nic", "list", name)


def nic_add(name: str, test: bool = False, **options: Any) -> Any:
    """
    Plug a NIC into a running instance, with the options of brine-nic(1).

    CLI Example::

        salt kvm1 brine.nic_add web1 link=br0 vlan=100 ip='[192.0.2.7, "2001:db8::7"]'
    """
    return _said("nic", "add", name, *_options({"dry_run": test, **options}))


def nic_modify(name: str, nic: str, test: bool = False, **options: Any) -> Any:
    """
    Change a NIC of a running instance: its device id, UUID or MAC, and the options of brine-nic(1).

    CLI Example::

        salt kvm1 brine.nic_modify web1 aa:00:00:4b:1c:2d link=br1
    """
    return _said("nic", "modify", name, nic, *_options({"dry_run": test, **options}))


def nic_remove(name: str, nic: str, test: bool = False, **options: Any) -> Any:
    """
    Unplug a NIC of a running instance: its device id, UUID or MAC.

    CLI Example::

        salt kvm1 brine.nic_remove web1 aa:00:00:4b:1c:2d
    """
    return _said("nic", "remove", name, nic, *_options({"dry_run": test, **options}))


def disk_list(name: str) -> Any:
    """
    List the disks of a running instance.

    CLI Example::

        salt kvm1 brine.disk_list web1
    """
    return _said("disk", "list", name)


def disk_add(name: str, path: str, test: bool = False, **options: Any) -> Any:
    """
    Plug a disk into a running instance, with the options of brine-disk(1).

    CLI Example::

        salt kvm1 brine.disk_add web1 /dev/vg0/data read_only=True
    """
    return _said("disk", "add", name, *_options({"path": path, "dry_run": test, **options}))


def disk_remove(name: str, disk: str, test: bool = False, **options: Any) -> Any:
    """
    Unplug a disk of a running instance: its path, device id, UUID or serial.

    CLI Example::

        salt kvm1 brine.disk_remove web1 /dev/vg0/data
    """
    return _said("disk", "remove", name, disk, *_options({"dry_run": test, **options}))


def node_cpu() -> Any:
    """
    Tell which processor QEMU can give a guest on this node: what ``salt-run brine.cpu_baseline``
    asks.

    CLI Example::

        salt '*' brine.node_cpu
    """
    return _said("node", "cpu")


def node_facts() -> Any:
    """
    Tell what this node can give to instances: processor, machine types, memory, bridges and storage
    units.

    CLI Example::

        salt '*' brine.node_facts
    """
    return _said("node", "facts")


def move_offer(name: str, cold: bool = False) -> Any:
    """
    Tell what would move of an instance, or the ``obstacles`` that keep it here, a line for each.
    It changes nothing, and tells no secret.

    CLI Example::

        salt kvm1 brine.move_offer web1
    """
    answer = ask("move", "offer", name, *_options({"cold": cold}))
    if "refused" not in answer:
        return answer["said"]
    told = ask("instance", "info", name).get("said")
    blocked = "cold" if cold or not _runs(told) else "live"
    found = told.get("obstacles") if isinstance(told, dict) else None
    lines = [one["why"] for one in found or [] if blocked in one["blocks"]]
    return {"obstacles": lines or [answer["refused"]]}


def _runs(told: Any) -> bool:
    return isinstance(told, dict) and told.get("oper_state") == "running"


def move_check(offer: Any) -> Any:
    """
    Tell what keeps an instance that another node offers from moving to this one.

    CLI Example::

        salt kvm2 brine.move_check "$(cat offer.json)"
    """
    return _said("move", "check", stdin=offer)


def move_step(question: Any, wait: float = 0.0) -> Any:
    """
    Do a step of a move, and tell how far it is: ``salt-run brine.migrate`` asks for it.

    :param question: ``id``, ``step`` and ``facts``, as ``brine move next`` has them.
    :param wait: for how many seconds this waits for the end of the step.

    CLI Example::

        salt kvm1 brine.move_step '{id: 0176-0, step: offer, facts: {instance: web1}}' 5
    """
    waiting = [f"--wait={wait}"] if wait else []
    return _said("move", "step", *waiting, stdin=question)


def node_state() -> Any:
    """
    Tell the boot id, the kernel, and the daemons of this node: what ``salt-run brine.reboot``
    compares.

    CLI Example::

        salt '*' brine.node_state
    """
    return _said("node", "state")


def storage_list(type: str | None = None) -> Any:
    """
    List the storage units of a node; type is lvm-pv, lvm-vg or file.

    CLI Example::

        salt '*' brine.storage_list type=lvm-vg
    """
    return _said("storage", "list", *_options({"type": type}))


def storage_check() -> Any:
    """
    List the storage units that are not ok. If there are any, the return code is 1.

    CLI Example::

        salt '*' brine.storage_check
    """
    return _said("storage", "check")


def storage_facts() -> Any:
    """
    The default unit of a node, and the space of all its storage units in bytes.

    CLI Example::

        salt '*' brine.storage_facts
    """
    return _said("storage", "facts")


def storage_modify(type: str, name: str, allocatable: bool) -> Any:
    """
    Change whether new volumes may take space in a storage unit.

    CLI Example::

        salt kvm1 brine.storage_modify lvm-pv /dev/sdb allocatable=False
    """
    options = _options({"allocatable": "yes" if allocatable else "no"})
    return _said("storage", "modify", type, name, *options)


def verdicts(*names: str, since: str | None = None) -> Any:
    """
    List who ended which instance.

    CLI Example::

        salt '*' brine.verdicts since=1h
        salt kvm1 brine.verdicts web1 db1
    """
    return _said("kvmd", "verdicts", *names, *_options({"since": since}))


def confd_ping(**options: Any) -> Any:
    """
    Ask every master candidate whether its configuration daemon answers.

    CLI Example::

        salt kvm1 brine.confd_ping timeout=5
    """
    return _said("confd", "ping", *_options(options))


def confd_query(kind: str, *arguments: str, **options: Any) -> Any:
    """
    Ask the configuration daemons, as brine-confd(1) describes.

    CLI Example::

        salt kvm1 brine.confd_query node-role kvm2.example.com
    """
    return _said("confd", "query", kind, *arguments, *_options(options))


def config_show(pointer: str = "") -> Any:
    """
    Show the cluster's configuration, or a part of it. The output stands in Salt's job cache, the
    private parameters of operating systems, too: with those, use ``brine config show`` there.

    CLI Example::

        salt kvm1 brine.config_show /instances/web1/admin_state
    """
    return _said("config", "show", pointer)


def config_apply(data: Any, prune: bool = False, test: bool = False) -> Any:
    """
    Merge declarations, as in brine-config.data(5), into the cluster's configuration. They stand in
    Salt's job cache after that: secrets belong into pillar.

    CLI Example::

        salt kvm1 brine.config_apply '{cluster: {uid_pool: 4000-4099}}' test=True
    """
    options = _options({"prune": prune, "dry_run": test})
    return _said("config", "apply", "-", *options, stdin=data)


def config_verify() -> Any:
    """
    Look for faults in the cluster's configuration.

    CLI Example::

        salt kvm1 brine.config_verify
    """
    return _said("config", "verify")


def config_versions() -> Any:
    """
    List the kept versions of the cluster's configuration.

    CLI Example::

        salt kvm1 brine.config_versions
    """
    return _said("config", "versions")


def watcher_status() -> Any:
    """
    Show whether the watcher is paused, and its tries to start each instance.

    CLI Example::

        salt '*' brine.watcher_status
    """
    return _said("watcher", "status")


def watcher_run(test: bool = False) -> Any:
    """
    Bring each instance to its desired state.

    CLI Example::

        salt kvm1 brine.watcher_run test=True
    """
    return _said("watcher", "run", *_options({"dry_run": test}))


def watcher_pause(time: str) -> Any:
    """
    Pause the watcher: for 90s, 30m, 2h, 3d or 1w.

    CLI Example::

        salt '*' brine.watcher_pause 1h
    """
    return _said("watcher", "pause", time)


def watcher_resume() -> Any:
    """
    End a pause of the watcher.

    CLI Example::

        salt '*' brine.watcher_resume
    """
    return _said("watcher", "resume")


def watcher_forget(name: str) -> Any:
    """
    Forget the watcher's tries to start an instance.

    CLI Example::

        salt kvm1 brine.watcher_forget web1
    """
    return _said("watcher", "forget", name)


def outbox_list() -> Any:
    """
    List the events that the cluster does not know yet.

    CLI Example::

        salt '*' brine.outbox_list
    """
    return _said("outbox", "list")


def outbox_acknowledge(*ids: str) -> Any:
    """
    Remove events that the cluster's configuration has.

    CLI Example::

        salt kvm1 brine.outbox_acknowledge 01764000000000000000-0123abcd
    """
    return _said("outbox", "acknowledge", *ids)


def _said(*command: str, stdin: Any = "") -> Any:
    """The output of ``brine``. If the command failed, Salt's exit status is 1. If it also printed
    nothing, an error of Salt's is raised."""
    answer = ask(*command, stdin=stdin)
    if "said" not in answer:
        raise CommandExecutionError(answer["refused"])
    if "refused" in answer:
        log.error("%s", answer["refused"])
        __context__["retcode"] = 1
    return answer["said"]


def _options(given: Mapping[str, Any]) -> list[str]:
    """Arguments by name as options of a command line."""
    line = []
    for key, value in given.items():
        # Those that begin with __ are Salt's own.
        if key.startswith("__") or value is None or value is False:
            continue
        option = f"--{key.replace('_', '-')}"
        if value is True:
            line.append(option)
        else:
            several = value if isinstance(value, (list, tuple)) else [value]
            line += [f"{option}={one}" for one in several]
    return line
