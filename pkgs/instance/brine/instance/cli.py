"""``brine instance``: virtual machines of this node."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from brine.common.cli import Command, seconds
from brine.common.errors import BrineError, UsageError, printable

_YAML = re.compile(rb"\s*(#|---|\w+:)")  # as no JSON object begins

# What takes long to load is loaded where it is used: --help has no need of it.


def _list(arguments: argparse.Namespace) -> int:
    from brine.common.cli import table
    from brine.instance.history import with_reasons
    from brine.instance.observe import look_at_all
    from brine.instance.report import row, summary
    from brine.instance.store import InstanceError

    found = list(look_at_all())
    seen = with_reasons([one for one in found if not isinstance(one, InstanceError)])
    faults = [one for one in found if isinstance(one, InstanceError)]
    if arguments.json:
        print(json.dumps([summary(one) for one in seen], indent=2))
    elif seen:
        wide = arguments.wide
        print(*table([row(one, wide=wide) for one in (None, *seen)]), sep="\n")
    elif not faults:
        print("no instance is defined")
    for fault in faults:
        _tell(fault)
    return 1 if faults else 0


def _info(arguments: argparse.Namespace) -> int:
    from brine.instance.history import with_reasons
    from brine.instance.observe import look
    from brine.instance.report import details, text

    (seen,) = with_reasons([look(arguments.name)])
    found = details(seen)
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(text(found)))
    return 0


def _define(arguments: argparse.Namespace) -> int:
    from brine.instance.kvm.live_changes import dropped
    from brine.instance.operations import define_instance
    from brine.instance.report import AS_ROOT
    from brine.instance.schema import SpecError, to_json

    if arguments.from_config == (arguments.file is not None):
        hint = "give a file, or -, or --from-config"
        raise UsageError("where is the spec to come from?", hint=hint)
    if arguments.node is not None and not arguments.from_config:
        hint = "a spec that is given is this node's"
        raise UsageError("--node goes with --from-config", hint=hint)
    if arguments.from_config:
        return _import(arguments)
    _log_to_journal()
    data = _input(arguments.file)
    try:
        defined = define_instance(data, dry_run=arguments.dry_run)
    except SpecError as error:
        place = "standard input" if arguments.file == "-" else arguments.file
        raise BrineError(f"{place}: {error}", hint=error.hint) from error
    spec, changed = defined.spec, defined.changed
    if defined.aside:
        text = f"the damaged spec of {spec.name} is kept as {defined.aside}"
        print(f"brine: warning: {text}", file=sys.stderr)
    drops = dropped(spec) if changed else []
    if drops:
        text = f"its next start does not have what was plugged: {', '.join(drops)}"
        print(f"brine: warning: {spec.name}: {text}", file=sys.stderr)
        hint = 'to keep them, give the spec the "disks" and "nics" that are to be there'
        print(f"brine: hint: {hint}", file=sys.stderr)
    if arguments.json:
        result = {"name": spec.name, "changed": changed, "dry_run": arguments.dry_run}
        result["drops"] = drops
        print(json.dumps({**result, "spec": to_json(spec)}, indent=2))
        return 0
    if changed and not spec.is_xen() and spec.security_model == "none":
        print(f"brine: warning: {spec.name}: {AS_ROOT}", file=sys.stderr)
    if not changed:
        print(f"unchanged: {spec.name}")
    elif arguments.dry_run:
        print(f"would be defined: {spec.name}")
    else:
        later = "; it runs, and has this from its next start on" if _waits(spec.name) else ""
        print(f"defined: {spec.name}{later}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from brine.config.store import ConfigStore
    from brine.instance import store
    from brine.instance.from_config import elsewhere, instances_of, keeping_users_will, spec_of
    from brine.instance.operations import define_instance
    from brine.instance.store import InstanceError

    _log_to_journal()
    configuration = ConfigStore().read()
    node = arguments.node or os.uname().nodename
    failed = False
    results: list[dict[str, Any]] = []
    for instance in instances_of(configuration, node):
        try:
            imported = spec_of(configuration, instance)
            data = keeping_users_will(imported.data, store.load_sound(instance.name))
            changed = define_instance(data, dry_run=arguments.dry_run).changed
        except BrineError as error:
            failed = True
            _tell(error, "" if isinstance(error, InstanceError) else f"{instance.name}: ")
            continue
        results.append({"name": instance.name, "changed": changed, "ignored": imported.ignored})
    others = elsewhere(configuration, node)
    if arguments.json:
        rows = [{"name": name, "node": owner} for name, owner in others.items()]
        data = {"instances": results, "elsewhere": rows, "dry_run": arguments.dry_run}
        print(json.dumps(data, indent=2))
        return 1 if failed else 0
    for result in results:
        word = "would be defined" if arguments.dry_run else "defined"
        print(f"{word if result['changed'] else 'unchanged'}: {result['name']}")
        for name in result["ignored"]:
            text = f"{result['name']}: its parameter {name} has no effect here"
            print(f"brine: warning: {text}", file=sys.stderr)
    if not results and not failed:
        print("no instance is this node's")
    for name, owner in others.items():
        text = f"{name}: is defined here, and is {owner}'s in the cluster's configuration"
        print(f"brine: warning: {text}", file=sys.stderr)
        hint = f"brine instance undefine {name}, unless it is to come back"
        print(f"brine: hint: {hint}", file=sys.stderr)
    return 1 if failed else 0


def _import_machine(arguments: argparse.Namespace) -> int:
    from brine.instance import store
    from brine.instance.operations import define_instance
    from brine.instance.schema import to_json

    if (arguments.image is None) == (arguments.libvirt is None):
        raise UsageError("what is to be imported?", hint="name an image, or --libvirt FILE")
    _log_to_journal()
    data, ignored = _machine_of(arguments)
    for key, value in (
        ("name", arguments.name),
        ("memory_mib", arguments.memory_mib),
        ("vcpus", arguments.vcpus),
        ("accel", arguments.accel),
    ):
        if value is not None:
            data[key] = value
    if data.get("accel") == "tcg" and data.get("cpu") == "host":
        del data["cpu"]
        ignored.append("cpu host, as this processor is emulated: QEMU's own is the guest's")
    name = data["name"]
    if store.spec_file_of(name).exists():
        hint = "give another --name, or change it: brine instance define"
        raise store.InstanceError(name, "is defined already", hint=hint)
    defined = define_instance(data, dry_run=arguments.dry_run)
    if arguments.json:
        result = {"name": name, "changed": defined.changed, "ignored": ignored}
        result |= {"dry_run": arguments.dry_run, "spec": to_json(defined.spec)}
        print(json.dumps(result, indent=2))
        return 0
    for what in ignored:
        print(f"brine: warning: {name}: no counterpart: {printable(what)}", file=sys.stderr)
    if arguments.dry_run:
        print(json.dumps(data, indent=2))
    else:
        print(f"defined: {name}; brine instance start {name}")
    return 0


def _machine_of(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The spec of what is to be imported, and what of that has no counterpart."""
    if arguments.libvirt is not None:
        from brine.instance.libvirt import spec_of_domain

        place, content = _content(arguments.libvirt)
        try:
            imported = spec_of_domain(content, link=arguments.link or "")
        except BrineError as error:
            raise BrineError(f"{place}: {error}", hint=error.hint) from error
        return imported.data, list(imported.ignored)
    from brine.hotplug.choices import FORMATS
    from brine.hotplug.disk import format_of

    image = Path(arguments.image).absolute()
    found = format_of(image)
    if found not in FORMATS:
        hint = f"qemu-img convert -O qcow2 {image} {image.with_suffix('.qcow2')}"
        raise BrineError(f"{image}: is an image of the format {found}", hint=hint)
    data: dict[str, Any] = {
        "name": image.name.split(".")[0],
        "disks": [{"path": str(image), "format": found}],
    }
    if arguments.link:
        data["nics"] = [{"link": arguments.link}]
    return data, []


def _undefine(arguments: argparse.Namespace) -> int:
    from brine.instance.operations import undefine_instance

    _log_to_journal()
    undefine_instance(arguments.name)
    print(f"undefined: {arguments.name}")
    return 0


def _rename(arguments: argparse.Namespace) -> int:
    from brine.instance.operations import rename_instance

    _log_to_journal()
    rename_instance(arguments.name, arguments.new_name)
    print(f"renamed: {arguments.name} to {arguments.new_name}")
    return 0


def _clone(arguments: argparse.Namespace) -> int:
    from brine.instance.clone import DiskCopy, clone_instance
    from brine.instance.schema import to_json

    _undo_when_told_to_end()
    _log_to_journal()

    def tell(copy: DiskCopy) -> None:
        text = f"copying {copy.source} to {copy.target}, {copy.size_mib} MiB ..."
        print(f"brine: {printable(text)}", file=sys.stderr, flush=True)

    source, name = arguments.name, arguments.new_name
    clone = clone_instance(
        source,
        name,
        disks=dict(arguments.disk),
        addresses=dict(arguments.address),
        dry_run=arguments.dry_run,
        tell=tell,
    )
    if arguments.json:
        result = {"name": name, "source": source, "dry_run": arguments.dry_run}
        result |= {"disks": [asdict(one) for one in clone.copies], "notes": list(clone.notes)}
        print(json.dumps({**result, "spec": to_json(clone.spec)}, indent=2))
        return 0
    for note in clone.notes:
        print(f"brine: warning: {name}: {printable(note)}", file=sys.stderr)
    if arguments.dry_run:
        for one in clone.copies:
            text = f"would be copied: {one.source} to {one.target}, {one.size_mib} MiB"
            print(printable(text))
        print(f"would be cloned: {source} to {name}")
    else:
        print(f"cloned: {source} to {name}; brine instance start {name}")
    return 0


def _start(arguments: argparse.Namespace) -> int:
    from brine.instance.start import start_instance

    if arguments.name is None and not arguments.all:
        raise UsageError("which instance?", hint="give its name, or --all")
    if arguments.name is not None and arguments.all:
        raise UsageError("--all, or that one?", hint="give a name, or --all")
    _log_to_journal()
    if arguments.all:
        return _start_all()

    def warn(aside: object) -> None:
        print(f"brine: warning: {arguments.name}: {aside}", file=sys.stderr, flush=True)

    try:
        changed = start_instance(arguments.name, warn=warn)
    except KeyboardInterrupt:
        return _interrupted(arguments.name, runs="runs")
    print(f"started: {arguments.name}" if changed else f"unchanged: {arguments.name} runs")
    return 0


def _start_all() -> int:
    from brine.instance.settings import load_settings
    from brine.instance.start import StillStartingError, start_all

    failed = False
    for name, error in start_all(parallel=load_settings().parallel_starts):
        if error is None:
            print(f"started: {name}", flush=True)
        elif isinstance(error, StillStartingError):
            print(f"brine: warning: {error}", file=sys.stderr, flush=True)
        else:
            failed = True
            _tell(error)
    return 1 if failed else 0


def _stop(arguments: argparse.Namespace) -> int:
    from brine.instance.operations import Stopped, stop_instance

    _undo_when_told_to_end()
    _log_to_journal()
    name = arguments.name
    try:
        done = stop_instance(name, force=arguments.force, timeout_s=arguments.timeout)
    except KeyboardInterrupt:
        return _interrupted(name, runs="runs on, and may still do what it was asked")
    words = {
        Stopped.STOPPED: f"stopped: {name}",
        Stopped.NOTED: f"noted: {name} is down already, and should be from now on",
        Stopped.CLEANED_UP: f"cleaned up: {name} was down already, and what was left of it is gone",
        Stopped.UNCHANGED: f"unchanged: {name} does not run",
    }
    print(words[done])
    return 0


def _interrupted(name: str, *, runs: str) -> int:
    """Say what holds of an instance that somebody does not wait for any more.

    :param runs: what to say of it if it runs.
    """
    from brine.instance.observe import look
    from brine.instance.status import Oper

    try:
        seen = look(name)
    except BrineError:
        return 128 + signal.SIGINT  # it has no spec, say
    words = runs if seen.state.oper is Oper.RUNNING else f"is {seen.state.oper}"
    text = f"interrupted: {name} {words}; its admin_state is {seen.spec.admin_state}"
    print(text, file=sys.stderr)
    return 128 + signal.SIGINT


def _reboot(arguments: argparse.Namespace) -> int:
    from brine.instance.operations import reboot_instance, reset_instance

    _undo_when_told_to_end()
    _log_to_journal()
    if arguments.reset:
        if arguments.force or arguments.timeout is not None:
            hint = "leave out --force and --timeout, or --reset"
            raise UsageError("--reset asks nobody, and waits for nobody", hint=hint)
        reset_instance(arguments.name)
        print(f"reset: {arguments.name}")
        return 0
    reboot_instance(arguments.name, force=arguments.force, timeout_s=arguments.timeout)
    print(f"rebooted: {arguments.name}")
    return 0


def _pause(arguments: argparse.Namespace) -> int:
    from brine.instance.operations import pause_instance

    _log_to_journal()
    changed = pause_instance(arguments.name)
    print(f"paused: {arguments.name}" if changed else f"unchanged: {arguments.name} is paused")
    return 0


def _resume(arguments: argparse.Namespace) -> int:
    from brine.instance.operations import resume_instance

    _log_to_journal()
    changed = resume_instance(arguments.name)
    print(f"resumed: {arguments.name}" if changed else f"unchanged: {arguments.name} is not paused")
    return 0


def _edit(arguments: argparse.Namespace) -> int:
    import subprocess
    import tempfile

    from brine.instance import store
    from brine.instance.operations import define_instance
    from brine.instance.schema import to_json

    _log_to_journal()
    name = arguments.name
    before = store.load(name)
    text = json.dumps(to_json(before), indent=2) + "\n"
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "editor"
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"brine-{name}-", suffix=".json", delete=False
    ) as f:
        f.write(text)
    kept = Path(f.name)
    try:
        try:
            subprocess.run([*shlex.split(editor), str(kept)], check=True)
        except subprocess.CalledProcessError as error:
            said = f"{editor}: failed with exit status {error.returncode}"
            raise BrineError(said, hint="EDITOR names another one") from error
        except OSError as error:
            said = f"{editor}: {error.strerror}"
            raise BrineError(said, hint="EDITOR names another one") from error
        except ValueError as error:
            raise BrineError(f"{editor}: {error}", hint="EDITOR names another one") from error
        if kept.read_text() == text:
            kept.unlink()
            print(f"unchanged: {name}")
            return 0
        data = _input(str(kept))
        if isinstance(data, dict) and data.get("name") != name:
            hint = f"brine instance rename {name} NAME gives it another name"
            raise UsageError(f"the name is {name}, and can't be edited", hint=hint)
        if store.load(name) != before:
            raise BrineError(f"{name}: somebody else has defined it meanwhile")
        defined = define_instance(data)
    except BrineError as error:
        if kept.read_text() == text:
            kept.unlink()
        else:
            print(f"brine: warning: what you wrote is kept as {kept}", file=sys.stderr)
        raise error
    kept.unlink()
    later = "; it runs, and has this from its next start on" if _waits(name) else ""
    print(f"defined: {name}{later}" if defined.changed else f"unchanged: {name}")
    return 0


def _console(arguments: argparse.Namespace) -> int:
    from brine.instance.console import NoLineError, attach
    from brine.instance.control import control_of, domain_file
    from brine.instance.store import spec_file_of

    _undo_when_told_to_end()
    name = arguments.name
    spec_file_of(name)  # or it is no name
    if domain_file(name).exists():
        _become_console(name)
    try:
        return attach(name, control_of(name).serial)
    except NoLineError:
        _refuse_down(name)
        raise


def _cdrom(arguments: argparse.Namespace) -> int:
    from brine.instance.kvm.cdrom import EJECT_TIMEOUT_S, change_medium

    if (arguments.medium is None) != arguments.eject:
        raise UsageError("what is to be in the drive?", hint="name a medium, or give --eject")
    _undo_when_told_to_end()
    _log_to_journal()
    name, number = arguments.name, arguments.drive
    path = "" if arguments.eject else os.path.abspath(arguments.medium)
    dry_run = arguments.dry_run
    changed = change_medium(
        name,
        path,
        number=number,
        force=arguments.force,
        timeout_s=arguments.timeout or EJECT_TIMEOUT_S,
        dry_run=dry_run,
    )
    if arguments.json:
        result = {"name": name, "drive": number, "medium": path or None}
        print(json.dumps({**result, "changed": changed, "dry_run": dry_run}, indent=2))
        return 0
    what = f"drive {number} of {name} " + (f"has {printable(path)}" if path else "is empty")
    if not changed:
        print(f"unchanged: {what}")
    else:
        print(f"{'would be ' if dry_run else ''}changed: {what}")
    return 0


def _log(arguments: argparse.Namespace) -> int:
    from brine.instance import store
    from brine.instance.console import lines_of, read_log

    name = arguments.name
    store.spec_file_of(name)  # or it is no name
    try:
        is_xen = store.load(name).is_xen()
    except store.NoSpecError:
        raise
    except store.InstanceError:
        is_xen = False
    data = read_log(name, is_xen=is_xen)
    lines = lines_of(data)
    if arguments.lines is not None:
        lines = lines[-arguments.lines :]
        data = b"".join(data.splitlines(keepends=True)[-arguments.lines :])
    if arguments.json:
        print(json.dumps({"name": name, "lines": lines}, indent=2))
    elif arguments.raw:
        sys.stdout.buffer.write(data)
    else:
        print(*lines, sep="\n")
    return 0


def _become_console(name: str) -> NoReturn:
    """Become Xen's own program for the console of a domain."""
    from brine.instance.xen.domain import become_console

    _refuse_down(name)
    become_console(name)


def _refuse_down(name: str) -> None:
    """Tell a person who wants the console of an instance that it does not run."""
    from brine.instance.observe import look
    from brine.instance.status import Oper
    from brine.instance.store import InstanceError

    if look(name).state.oper in (Oper.DOWN, Oper.USER_SHUTDOWN):
        raise InstanceError(name, "does not run", hint=f"brine instance start {name}")


def _tell(error: BrineError, of_whom: str = "") -> None:
    """Tell of one error among others, as :func:`brine.common.errors.die` tells of the only one."""
    print(f"brine: error: {of_whom}{error}", file=sys.stderr, flush=True)
    if error.hint:
        print(f"brine: hint: {error.hint}", file=sys.stderr, flush=True)


def _log_to_journal() -> None:
    from brine.instance.messages import log_to_journal

    log_to_journal("brine")


def _undo_when_told_to_end() -> None:
    """Have the signals that end a process end it in order: what was begun is undone first."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # as nohup(1) has it
            signal.signal(each, end)


def _waits(name: str) -> bool:
    """Whether an instance runs otherwise than its spec says, as far as can be known: an image that
    is being built has no systemd."""
    from brine.instance.kvm.live_changes import running_spec
    from brine.instance.observe import look
    from brine.instance.status import Oper
    from brine.instance.unit import UnitError

    try:
        seen = look(name)
    except UnitError:
        return False
    running = running_spec(seen)
    return bool(running.pending) if running else seen.state.oper is Oper.RUNNING


def _input(file: str) -> Any:
    """What a file has, or standard input.

    :raises BrineError: if it is no JSON.
    """
    from brine.config.schema import ConfigError, parse_json

    place, data = _content(file)
    if file.endswith((".yaml", ".yml")) or (file == "-" and _YAML.match(data)):
        return _yaml(place, data)
    try:
        return parse_json(data, unique_keys=True)
    except ConfigError as error:
        raise BrineError(f"{place}: {error}", hint=error.hint) from error


def _yaml(place: str, data: bytes) -> Any:
    """What YAML says.

    :raises BrineError: if it is none, or there is nothing to read it with.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        hint = "apt install python3-yaml; or write the spec in JSON"
        raise BrineError(f"{place}: YAML can't be read here", hint=hint) from None

    class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
        """YAML of which no key stands twice in a mapping."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value in seen:
                    text = f"the key {key.value} stands twice"
                    raise yaml.MarkedYAMLError(problem=text, problem_mark=key.start_mark)
                seen.add(str(key.value))
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    try:
        return yaml.load(data, Loader=UniqueKeys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}" if mark else ""
        raise BrineError(f"{place}: not valid YAML{where}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BrineError(f"{place}: not valid YAML: {error}") from None


def _content(file: str) -> tuple[str, bytes]:
    """What a file is called in messages, and what it has; ``-`` is standard input.

    :raises BrineError: if it can't be read.
    """
    if file == "-":
        return "standard input", sys.stdin.buffer.read()
    try:
        return file, Path(file).read_bytes()
    except OSError as error:
        raise BrineError(f"{file}: can't be read: {error.strerror}") from error


def _pair(text: str) -> tuple[str, str]:
    before, _, after = text.partition("=")
    if not before or not after:
        raise argparse.ArgumentTypeError(f"no two values with = between them: {text!r}")
    return before, after


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) > 99:
        raise argparse.ArgumentTypeError(f"no number from 0 to 99: {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1_000_000:
        raise argparse.ArgumentTypeError(f"no number from 1 to 999999: {text!r}")
    return int(text)


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, run: Any, text: str, *, of_one: bool = True) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(run=run)
        if of_one:
            added.add_argument("name", metavar="INSTANCE")
        return added

    def ending(added: argparse.ArgumentParser) -> None:
        added.add_argument(
            "--timeout",
            type=seconds,
            metavar="SECONDS",
            help="how long the guest may take (default: what its spec says)",
        )
        added.add_argument(
            "--force", action="store_true", help="end it if the guest does not shut down in time"
        )

    listing = verb("list", _list, "list the instances, and what they do", of_one=False)
    listing.add_argument("--wide", action="store_true", help="with UP SINCE and NODE")
    listing.add_argument("--json", action="store_true", help="print JSON, for programs")
    info = verb("info", _info, "show what is known of an instance")
    info.add_argument("--json", action="store_true", help="print JSON, for programs")
    define = verb("define", _define, "say what an instance should be", of_one=False)
    define.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="its spec, in JSON, or in YAML if it is called so; - is standard input, with either",
    )
    define.add_argument(
        "--from-config",
        action="store_true",
        help="all instances of this node, from the cluster's configuration",
    )
    define.add_argument("--node", metavar="NODE", help="of which node, if not of this one")
    define.add_argument("--json", action="store_true", help="print JSON, for programs")
    define.add_argument("--dry-run", action="store_true", help="only say what would be done")
    importing = verb(
        "import",
        _import_machine,
        "define an instance that boots an image, or is what a libvirt domain is",
        of_one=False,
    )
    importing.add_argument("image", metavar="IMAGE", nargs="?", help="the image of its disk")
    importing.add_argument(
        "--libvirt",
        metavar="FILE",
        help="what virsh dumpxml --inactive has printed; - is standard input",
    )
    importing.add_argument("--name", metavar="NAME", help="of the instance")
    importing.add_argument(
        "--link", metavar="BRIDGE", help="of a NIC, or of NICs that libvirt has on no bridge"
    )
    importing.add_argument("--memory-mib", type=int, metavar="MIB", help="of the guest")
    importing.add_argument("--vcpus", type=int, metavar="N", help="of the guest")
    importing.add_argument("--accel", choices=("kvm", "tcg"), help="tcg emulates the processor")
    importing.add_argument("--json", action="store_true", help="print JSON, for programs")
    importing.add_argument(
        "--dry-run", action="store_true", help="only print the spec, and define nothing"
    )
    verb("undefine", _undefine, "forget an instance that does not run")
    rename = verb("rename", _rename, "give an instance that does not run another name")
    rename.add_argument("new_name", metavar="NAME")
    clone = verb("clone", _clone, "make an instance that is as another one, which does not run")
    clone.add_argument("new_name", metavar="NAME")
    clone.add_argument(
        "--disk",
        type=_pair,
        action="append",
        default=[],
        metavar="PATH=OTHER",
        help="where the clone has a disk; a block device is overwritten",
    )
    clone.add_argument(
        "--address",
        type=_pair,
        action="append",
        default=[],
        metavar="ADDRESS=OTHER",
        help="which address the clone's NIC has in the place of another",
    )
    clone.add_argument("--json", action="store_true", help="print JSON, for programs")
    clone.add_argument("--dry-run", action="store_true", help="only say what would be done")
    start = verb("start", _start, "start an instance", of_one=False)
    start.add_argument("name", metavar="INSTANCE", nargs="?")
    start.add_argument("--all", action="store_true", help="all that should be up and are down")
    ending(verb("stop", _stop, "have an instance's guest shut down"))
    reboot = verb("reboot", _reboot, "have an instance's guest shut down, and start it anew")
    ending(reboot)
    reboot.add_argument("--reset", action="store_true", help="press the reset button instead")
    verb("pause", _pause, "have an instance's processors stand still")
    verb("resume", _resume, "have a paused instance go on")
    verb("edit", _edit, "change an instance's spec with your editor")
    cdrom = verb("cdrom", _cdrom, "change what is in a CD-ROM drive")
    cdrom.add_argument("medium", metavar="MEDIUM", nargs="?", help="an image, or a block device")
    cdrom.add_argument("--eject", action="store_true", help="leave the drive empty")
    cdrom.add_argument(
        "--drive", type=_number, default=0, metavar="N", help="which one; default: 0, the first"
    )
    cdrom.add_argument(
        "--force", action="store_true", help="take away what the guest has locked, too"
    )
    cdrom.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help="how long the guest may take to give up what it has locked (default: 10)",
    )
    cdrom.add_argument("--json", action="store_true", help="print JSON, for programs")
    cdrom.add_argument("--dry-run", action="store_true", help="only say what would be done")
    log = verb("log", _log, "show what an instance has said on its serial line last")
    log.add_argument("-n", "--lines", type=_count, metavar="N", help="only the last N lines")
    log.add_argument("--raw", action="store_true", help="with what controls a terminal")
    log.add_argument("--json", action="store_true", help="print JSON, for programs")
    verb("console", _console, "attach to an instance's serial line; Ctrl-] leaves")


COMMAND = Command("run virtual machines under systemd", _configure)
