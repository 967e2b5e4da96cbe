"""Many instances of one spec, in the node of a benchmark, whose units run something cheap."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness import UNITS, timed
from brine.instance.registry import define_instance
from brine.instance.store import spec_file_of
from brine.vm.unit_name import PREFIX

_PROGRAMS = """[Service]
ExecStart=
ExecStart={program}
ExecStartPost=
ExecStop=
ExecStopPost=
"""


def replace_programs(program: str) -> None:
    """Have the units of instances run this program, and nothing else."""
    folder = UNITS / f"{PREFIX}.service.d"
    folder.mkdir(parents=True)
    (folder / "bench.conf").write_text(_PROGRAMS.format(program=program), encoding="ascii")
    timed(["systemctl", "daemon-reload"])


def define_copies(spec: Mapping[str, Any], names: Sequence[str], running: int) -> None:
    """Define instances of one spec, of which the first ones are to run."""
    first = names[0]
    define_instance({**spec, "name": first})
    written = json.loads(spec_file_of(first).read_bytes())
    for number, name in enumerate(names):
        state = "up" if number < running else "down"
        data = {**written, "name": name, "uuid": str(uuid.uuid4()), "admin_state": state}
        spec_file_of(name).write_text(json.dumps(data, indent=2), encoding="utf-8")
