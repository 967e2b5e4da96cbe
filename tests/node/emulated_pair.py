"""Two nodes on a wire whose kernels map devices, for moves of logical volumes."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from lab.guest import result_in, run_order
from lab.guest_image import guest_image
from lab.waiting import wait_for
from lab.xen_node import LONGEST_S, XenNode
from lab.xen_packages import install
from node.instance_on_node import GUEST
from node.moves_on_node import ADDRESSES, KEY, UNIT, Pair

GROUP = "brine"
GROUP_MIB = {"n1": 96, "n2": 72}

_ORDER_S = "120"
_TALK = """\
import socket, sys, time
path, text, limit_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
with socket.socket(socket.AF_UNIX) as line:
    line.connect(path)
    line.settimeout(5)
    heard, ends = b"", time.monotonic() + limit_s
    while time.monotonic() < ends:
        line.sendall(f"\\n{text}\\n".encode())
        try:
            while b" ended with " not in heard or not heard.endswith(b"\\n"):
                if not (said := line.recv(4096)):
                    break
                heard += said
            else:
                break
        except TimeoutError:
            pass
sys.stdout.buffer.write(heard.replace(b"\\r\\n", b"\\n"))
"""


@contextmanager
def boot_emulated_pair(
    boot: Callable[[str], AbstractContextManager[XenNode]], release: str, packages: Iterable[Path]
) -> Iterator[Pair[XenNode]]:
    """Two nodes with a folder and a volume group for disks.

    :param boot: boots one of a release.
    """
    packages = list(packages)
    with ExitStack() as stack:
        wires = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="brine-wire-")))
        found = {name: stack.enter_context(boot(release)) for name in ADDRESSES}
        for name, node in found.items():
            (other,) = set(found) - {name}
            node.link(wires / name, wires / other)
            node.shell(f"echo {name} >/proc/sys/kernel/hostname; echo {name} >/etc/hostname")
            node.run(["ip", "address", "add", f"{ADDRESSES[name]}/24", "dev", "eth1"])
            install(node, release, packages)
            node.put(guest_image().folder, GUEST)
            node.write("/etc/brine/hmac.key", KEY, mode=0o600)
            make = f"vgcreate --quiet {GROUP} $(losetup --find --show /srv/group)"
            node.shell(
                f"mkdir {UNIT}; truncate --size={GROUP_MIB[name]}M /srv/group"
                f"; modprobe -a dm-mod loop; {make}; systemctl start brine-kvmd.path"
            )
            node.write("/etc/brine/storage.toml", f'directories = ["{UNIT}"]\n')
        yield Pair(found, step_s=LONGEST_S)


def run_inside(node: XenNode, name: str, command: str) -> str:
    """Run a shell command in a guest of QEMU's on such a node; return what it wrote."""

    def answer() -> tuple[int, str] | None:
        mark = f"command-{uuid.uuid4().hex[:8]}"
        line = f"/run/brine/ctrl/{name}.serial"
        talk = ["python3", "-c", _TALK, line, run_order(mark, command), _ORDER_S]
        said = node.run(talk, check=False, timeout_s=LONGEST_S).stdout
        return result_in(said.encode(), mark)

    status, output = wait_for(f"the guest {name}", answer, timeout_s=LONGEST_S)
    assert status == 0, (command, output)
    return output
