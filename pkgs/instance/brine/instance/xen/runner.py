"""What the runner does for an instance of Xen's: it becomes the xl that waits for its domain's end.

No process of ours stays. When a guest reboots, xl makes a new domain of it, and waits for that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from brine.common import paths
from brine.common.errors import BrineError
from brine.instance.spec import Spec
from brine.instance.spec_files import InstanceError
from brine.instance.xen import started, xl
from brine.instance.xen.configuration import GRUBS, kernel_of
from brine.instance.xen.leftovers import clean_up_ended
from brine.instance.xen.state import suspended


def become_xl(spec: Spec) -> NoReturn:
    """Become the xl that makes the domain of an instance, for which way was made.

    :raises BrineError: why it can't be started. Then nothing is left.
    :raises OSError: of xl, or of a file of ours.
    """
    # Of QEMU, if it was that.
    (paths.RUNTIME_DIR / f"{spec.name}.json").unlink(missing_ok=True)
    _check_files(spec)
    file = started.write(spec)
    environment = {**os.environ, "LC_ALL": "C"}
    os.execvpe(xl.PROGRAM, [xl.PROGRAM, "create", "-F", str(file)], environment)


def _check_files(spec: Spec) -> None:
    """Refuse what xl would say in many lines.

    :raises InstanceError: which file is not there.
    """
    for path in (kernel_of(spec), spec.initrd, *(disk.path for disk in spec.disks)):
        if path and not Path(path).exists():
            hint = None
            if path == GRUBS[spec.hypervisor]:
                hint = "apt install grub-xen-host, which finds the guest's; or name a kernel"
            raise InstanceError(spec.name, f"{path}: is not there", hint=hint)


def make_room(*, but: str) -> None:
    """Have Xen take back the memory of what has ended, whoever starts the next. If it does not, a
    start may fail.

    :param but: the instance that is to start.
    """
    try:
        failed = clean_up_ended(but=but)
    except BrineError as error:
        failed = [error]
    for one in failed:
        print(f"brine-instance: warning: {one}", file=sys.stderr)


def make_way(spec: Spec) -> None:
    """Remove what is left of the domain of its last run.

    :raises InstanceError: if that lives, without its unit, or is to be saved or moved.
    :raises XlError: if it can't be removed.
    """
    domain = xl.domain_of(spec.uuid)
    if domain and domain.lives():
        text = f"runs already, as domain {domain.number}, and not as this unit"
        raise InstanceError(spec.name, text, hint=f"brine instance stop {spec.name}")
    if domain and domain.is_suspended():
        raise suspended(spec.name)
    if domain and domain.has_ended():
        xl.destroy(domain)
