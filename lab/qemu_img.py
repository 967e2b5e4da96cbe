"""qemu-img on a node, whose image has no package with it: this host's, with its libraries."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from lab.command import run_command
from lab.errors import LabError
from lab.machine import Machine

_FOLDER = Path("/opt/qemu-img")


def put_qemu_img(machine: Machine) -> None:
    """Give a machine the command qemu-img."""
    program = shutil.which("qemu-img")
    if program is None:
        raise LabError("this host has no qemu-img: apt-get install qemu-utils")
    said = run_command(["ldd", program]).stdout
    libraries = re.findall(r"(/\S+) \(", said)
    folder = machine.path(_FOLDER)
    folder.mkdir(parents=True)
    for file in (program, *libraries):
        shutil.copy(file, folder)
    loader = next(Path(one).name for one in libraries if "ld-linux" in one)
    command = f"{_FOLDER}/{loader} --library-path {_FOLDER} {_FOLDER}/qemu-img"
    script = machine.path(Path("/usr/local/bin/qemu-img"))
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o755)
