"""What root does in a folder that another user may write, while that user replaces names there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.files import new_file, open_safely, read_regular
from brine.instance import store
from brine.instance.clone import clone_instance
from brine.instance.kvm.resources import check_node
from brine.instance.registry import define_instance
from brine.instance.service.clear import clear
from brine.instance.validate import completed
from brine.vm.disk import Disk
from brine.vm.disk_files import UnopenedError, format_of, opened
from brine.vm.runtime_file import Runtime, RuntimeFileError

pytestmark = pytest.mark.usefixtures("own_node")

_USER = 64711
_OTHER = 64712
_SECRET = b"only root may read this\n"

# Replaces names in a folder with links to a file of root's: new ones, or in turn that of the image.
_ATTACKER = """
import os, sys
folder, victim, image = sys.argv[1:]
os.chdir(folder)
print("attacking", flush=True)
def replace(name, make, what):
    make(what, "kept-swap")
    os.rename("kept-swap", name)
while True:
    try:
        if image:
            replace(image, os.symlink, victim)
            replace(image, os.link, f"kept-{image}")
        for name in () if image else os.listdir("."):
            if not name.startswith(("kept-", "web1.img")) and not os.path.islink(name):
                replace(name, os.symlink, victim)
    except OSError:
        pass
"""


# Is the kernel's partner for a folder with a file system that is mounted when it is first used, as
# x-systemd.automount has it. Runs each client while it is not mounted.
_AUTOMOUNT = """
import ctypes, fcntl, os, struct, subprocess, sys, threading
folder, *clients = sys.argv[1:]
requests, kernels = os.pipe()
options = f"fd={kernels},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct"
assert not ctypes.CDLL(None).mount(b"x", folder.encode(), b"autofs", 0, options.encode())
os.close(kernels)
trap = os.open(folder, os.O_RDONLY)
def serve():
    while packet := os.read(requests, 4096):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=777", "none", folder], check=True)
        with open(f"{folder}/there", "w") as file:
            file.write("it is there")
        _, _, token = struct.unpack_from("iiI", packet)
        fcntl.ioctl(trap, 0x9360, token)  # AUTOFS_IOC_READY
threading.Thread(target=serve, daemon=True).start()
begin = "import os, sys; from brine.common.files import *; folder = sys.argv[1]\\n"
for client in clients:
    # The kernel makes all others wait than processes of this group.
    subprocess.run([sys.executable, "-c", begin + client, folder], start_new_session=True)
    subprocess.run(["umount", folder])
os._exit(0)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that users may enter: pytest's own is root's alone."""
    folder = Path(tempfile.mkdtemp(prefix="brine-shared-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def theirs(place: Path) -> Path:
    """The user's folder, with an image."""
    folder = place / "theirs"
    folder.mkdir()
    image = folder / "web1.img"
    image.write_bytes(b"data" + bytes(4 << 20))
    os.link(image, folder / "kept-web1.img")
    for one in (folder, image):
        os.chown(one, _USER, _USER)
    return folder


@pytest.fixture
def secret(place: Path) -> Path:
    """A file of root's."""
    file = place / "secret"
    file.write_bytes(_SECRET)
    file.chmod(0o600)
    return file


@contextmanager
def attacked(folder: Path, victim: Path, image: str = "") -> Iterator[None]:
    """An unprivileged process replaces names in a folder while the block runs."""
    program = subprocess.Popen(
        [sys.executable, "-I", "-c", _ATTACKER, str(folder), str(victim), image],
        user=_USER,
        group=_USER,
        extra_groups=(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout
        assert program.stdout.readline() == "attacking\n"
        yield
        assert program.poll() is None
    finally:
        program.send_signal(signal.SIGKILL)
        program.communicate()


def linked(link: Path, target: Path, owner: int = _USER) -> Path:
    """Make a link that belongs to a user."""
    link.symlink_to(target)
    os.chown(link, owner, owner, follow_symlinks=False)
    return link


def test_a_clone_does_not_write_through_a_link(theirs: Path, secret: Path) -> None:
    image = str(theirs / "web1.img")
    define_instance({"name": "web1", "disks": [{"path": image, "format": "raw"}]})
    with attacked(theirs, secret):
        for number in range(15):
            with suppress(BrineError):  # of a name that is taken by now
                clone_instance("web1", f"c{number}", disks={image: str(theirs / f"c{number}")})
    assert secret.read_bytes() == _SECRET
    assert (secret.stat().st_uid, secret.stat().st_mode & 0o777) == (0, 0o600)


def test_a_clone_does_not_read_through_a_link(place: Path, theirs: Path, secret: Path) -> None:
    image = str(theirs / "web1.img")
    define_instance({"name": "web1", "disks": [{"path": image, "format": "raw"}]})
    copies = place / "copies"
    copies.mkdir()
    with attacked(theirs, secret, "web1.img"):
        for number in range(50):
            with suppress(BrineError):  # of the link
                clone_instance("web1", f"c{number}", disks={image: str(copies / f"c{number}")})
    found = {(one.read_bytes()[:4], one.stat().st_uid) for one in copies.iterdir()}
    assert found == {(b"data", _USER)}


@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
def test_a_users_link_leads_root_nowhere(theirs: Path, secret: Path, is_folder: bool) -> None:
    path = linked(theirs / "link", secret.parent if is_folder else secret)
    path = path / "secret" if is_folder else path
    for use in (
        lambda: open_safely(path, os.O_RDONLY),
        lambda: read_regular(path, safely=True),
        lambda: opened(Disk(uuid="", path=str(path), format="raw")).__enter__(),
        lambda: format_of(path),
    ):
        with pytest.raises((OSError, UnopenedError), match=f"symbolic link of the user {_USER}"):
            use()
    define_instance({"name": "web1", "disks": [{"path": str(theirs / "web1.img")}]})
    source = {str(theirs / "web1.img"): str(path.with_name("new"))}
    if is_folder:
        with pytest.raises(store.InstanceError, match=f"symbolic link of the user {_USER}"):
            clone_instance("web1", "web2", disks=source)
        assert sorted(one.name for one in secret.parent.iterdir()) == ["secret", "theirs"]


@pytest.mark.parametrize("key", ["kernel", "initrd", "vnc_password_file"])
def test_a_start_reads_nothing_through_a_users_link(theirs: Path, secret: Path, key: str) -> None:
    link = str(linked(theirs / "link", secret))
    beside = {"initrd": {"kernel": "/bin/true"}, "vnc_password_file": {"vnc_bind": "::1"}}
    keys = {"accel": "tcg", "qemu": "/bin/true", **beside.get(key, {}), key: link}
    spec = completed({"name": "web1", **keys})
    with pytest.raises(store.InstanceError, match=f"symbolic link of the user {_USER}"):
        check_node(spec)


def test_links_of_root_and_of_the_files_own_owner_count(theirs: Path, secret: Path) -> None:
    for number, (link, target) in enumerate([(0, secret), (_USER, theirs / "web1.img")]):
        path = linked(theirs / f"link{number}", target, link)
        descriptor = open_safely(path, os.O_RDONLY)
        assert os.path.samestat(os.fstat(descriptor), target.stat())
        os.close(descriptor)
    with pytest.raises(OSError, match="symbolic link of the user"):
        open_safely(linked(theirs / "other", theirs / "web1.img", _OTHER), os.O_RDONLY)


def test_a_runtime_file_is_not_written_through_a_users_link(theirs: Path, secret: Path) -> None:
    file = theirs / "runtime.json"
    file.write_text('{"nics": [], "disks": [], "ours": 1}')
    os.chown(file, _USER, _USER)
    runtime = Runtime.load(linked(theirs / "link", file))
    runtime.save(runtime.file)
    assert (file.stat().st_uid, "ours" in file.read_text()) == (_USER, True)
    assert runtime.file.is_symlink()
    (theirs / "link").unlink()
    linked(theirs / "link", secret)
    for use in (lambda: runtime.save(runtime.file), lambda: Runtime.load(runtime.file)):
        with pytest.raises(RuntimeFileError, match="symbolic link of the user"):
            use()
    assert secret.read_bytes() == _SECRET


def test_a_new_file_replaces_nothing(theirs: Path, secret: Path) -> None:
    target = theirs / "new"
    with pytest.raises(FileExistsError), new_file(target) as descriptor:
        os.write(descriptor, b"data")
        linked(target, secret)
    assert secret.read_bytes() == _SECRET
    target.unlink()
    with new_file(target) as descriptor:
        os.write(descriptor, b"data")
        assert not target.exists()
    assert target.read_bytes() == b"data"
    assert sorted(os.listdir(theirs)) == ["kept-web1.img", "new", "web1.img"]


def test_the_end_of_a_vm_removes_its_own_socket_and_no_other(theirs: Path, place: Path) -> None:
    other = place / "other"
    other.mkdir()
    for folder in (theirs, other):
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(folder / "web1.vnc"))
    bind = linked(theirs / "link", other) / "web1.vnc"
    for path in (bind, theirs / "web1.vnc"):
        spec = {"vnc_bind": str(path), "security_model": "none"}
        (paths.RUNTIME_DIR / "web1.json").write_text(json.dumps({"spec": spec}))
        clear("web1")
    assert os.listdir(other) == ["web1.vnc"]
    assert not (theirs / "web1.vnc").exists()


@pytest.mark.skipif("autofs" not in Path("/proc/filesystems").read_text(), reason="needs autofs")
def test_a_file_system_that_is_mounted_when_it_is_used_is(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    folder.mkdir()
    clients = {
        'print(os.read(open_safely(f"{folder}/there", os.O_RDONLY), 99).decode())': "it is there",
        "with new_file(Path(folder, 'new')): print(os.listdir(folder))": "['there']",
        'print(fault_of_writers(f"{folder}/there"))': f"others than root may write {folder} "
        "(chmod go-w)",
    }
    command = ["unshare", "--mount", "--propagation=private", sys.executable, "-c", _AUTOMOUNT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, str(folder), *clients],
        env=environment,
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.stdout.splitlines(), done.stderr) == (list(clients.values()), "")
    assert list(folder.iterdir()) == []
