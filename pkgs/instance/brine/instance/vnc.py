"""VNC passwords: from a file of the instance's own to its QEMU, over QMP, and nowhere else.

Source: design-2.1, "VNC Console Password".
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from brine.common.regular_file import read_regular
from brine.instance.spec import Spec
from brine.instance.spec_files import InstanceError

if TYPE_CHECKING:
    from brine.common.qmp_blocking import BlockingQmpClient

FIRST_VNC_PORT = 5900
LONGEST_PASSWORD = 8
"""VNC's own limit: it takes no notice of what follows."""


def read_password(spec: Spec) -> str:
    """The password of an instance, the first line of its file.

    :raises InstanceError: if it can't be had.
    """
    file = Path(spec.vnc_password_file)
    try:
        text = read_regular(file).decode().replace("\r\n", "\n")
        password = text.partition("\n")[0]
    except OSError as error:
        raise InstanceError(spec.name, f"{file}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise InstanceError(spec.name, f"{file}: is no text") from None
    if not 0 < len(password.encode()) <= LONGEST_PASSWORD:
        text = f"{file}: a VNC password has 1 to {LONGEST_PASSWORD} bytes"
        raise InstanceError(spec.name, text)
    if not password.isprintable():
        raise InstanceError(spec.name, f"{file}: has characters that can't be typed")
    return password


def set_password(qmp: BlockingQmpClient, spec: Spec) -> None:
    """Give QEMU the password, without which nobody gets in.

    :raises BrineError: if it can't be had, or QEMU refuses.
    """
    if spec.vnc_password_file:
        from brine.common.qmp_blocking import without_loop  # with what its caller has, who talks

        arguments = {"protocol": "vnc", "password": read_password(spec)}
        without_loop(qmp.execute("set_password", arguments))
