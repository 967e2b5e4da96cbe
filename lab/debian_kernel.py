"""Python of this machine run on Debian's own kernel, where the one that runs lacks something.

A small QEMU boots Debian's kernel into a tree of files in memory: this machine's Python and a few
of its programs, and the folders that are to be tried. So what is tried is what is at hand; only
the kernel is another. It runs in software emulation, some ten times slower. QEMU emulates a
processor that has virtualization, so that guests in it have KVM and are hardly slower again; one
that is emulated there takes minutes to boot.
"""

from __future__ import annotations

import lzma
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from lab.cache import cached
from lab.command import CommandError, ending_with_us, run_command
from lab.debian import host_release
from lab.errors import LabError
from lab.guest_image import kernel_package, module_needs, pack_initramfs, unpack_package
from lab.machine import require_commands

MEMORY_MIB = 3072

_INIT = Path(__file__).with_name("debian-kernel-init.sh")
_BUSYBOX_PACKAGE = "busybox-static"
# What openvswitch needs without saying so comes first.
_MODULES = ["qemu_fw_cfg", "crc32c_generic", "tun", "veth", "bridge", "8021q", "vhost_net"]
_MODULES += ["loop", "kvm-amd", "virtio_pci", "virtio_blk", "nf_tables"]
_MODULES += ["dm-mod", "dm-mirror", "dm-snapshot", "dm-flakey", "dm-thin-pool", "ext4"]
_PROGRAMS = ["ip", "bridge", "nft", "sh", "env", "sort", "touch", "sleep", "unshare"]
_PYTHON_PACKAGES = ["pyroute2", "systemd"]
_LEFT_OUT = shutil.ignore_patterns(
    "__pycache__", "test", "idlelib", "lib2to3", "mypy*", "ruff*", "config-*", "tkinter"
)
_TOLD = re.compile(rb"lab: status (\d+), (\d+) bytes\n")
_TOLD_BYTES = 64 * 2**20
_MOST_BOOTS = 2  # a loaded machine's emulated processor can fail, and ends without a result
_SCRIPT = Path("/lab-script")


def on_debian_kernel() -> bool:
    """Whether this process was started by run_on_debian_kernel()."""
    return _SCRIPT.exists()


def run_on_debian_kernel(
    arguments: Sequence[str | Path],
    *,
    paths: Iterable[Path],
    programs: Sequence[str] = (),
    timeout_s: float = 600,
) -> str:
    """Run this Python as root on Debian's kernel, with these arguments; return what it wrote.

    `paths` are files and folders that are copied to where they are here; `programs` are commands
    that it has beside a few that all have. It starts in the working directory of this process. All
    that it finds is in memory.

    Raises CommandError when it fails or takes longer than `timeout_s`.
    """
    require_commands("Debian's kernel", ["qemu-system-x86_64"])
    image = _image()
    with tempfile.TemporaryDirectory(prefix="brine-kernel-") as scratch:
        tree = Path(scratch) / "tree"
        _fill_root(tree / "tree", paths, [*_PROGRAMS, *programs])
        command = shlex.join([sys.executable, *map(str, arguments)])
        script = tree / "tree" / _SCRIPT.relative_to("/")
        script.write_text(f"cd {shlex.quote(str(Path.cwd()))}\n{command}\n")
        # The kernel takes several archives, one after the other, each at a multiple of 4.
        archive = Path(scratch) / "root.cpio"
        _archive(tree, image / "busybox", archive)
        initramfs = Path(scratch) / "initramfs"
        base = (image / "initramfs").read_bytes()
        initramfs.write_bytes(base + bytes(-len(base) % 4) + archive.read_bytes())
        disk = Path(scratch) / "disk"
        disk.touch()
        os.truncate(disk, _TOLD_BYTES)
        qemu: list[str | Path] = [
            *ending_with_us(),
            "qemu-system-x86_64",
            *("-accel", "tcg,thread=multi", "-smp", "2", "-m", str(MEMORY_MIB)),
            *("-cpu", "qemu64,+svm,+npt"),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-kernel", image / "kernel", "-initrd", initramfs),
            *("-append", "console=ttyS0 panic=-1 quiet mitigations=off"),
            *("-drive", f"file={disk},if=virtio,format=raw"),
            *("-serial", "stdio"),
        ]
        for _ in range(_MOST_BOOTS):
            ended = run_command(qemu, timeout_s=timeout_s, check=False)
            told = disk.read_bytes()
            if found := _TOLD.match(told):
                break
    if not found:
        raise LabError(f"Debian's kernel ended too early:\n{ended.stdout}{ended.stderr}")
    returncode, said_bytes = map(int, found.groups())
    said = told[found.end() : found.end() + said_bytes].decode(errors="replace")
    if returncode:
        raise CommandError("Python on Debian's kernel", arguments, returncode, said, ended.stdout)
    return said


def _image() -> Path:
    """The folder of the kernel, and of an initramfs with its modules."""
    init = _INIT.read_text()

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            packages = Path(scratch)
            packages.chmod(0o755)
            unpacked = packages / "unpacked"
            for package in (kernel_package(), _BUSYBOX_PACKAGE):
                unpack_package(package, packages, unpacked)
            shutil.copy(next(unpacked.glob("boot/vmlinuz-*")), folder / "kernel")
            tree = packages / "initramfs"
            _fill_base(tree, unpacked)
            shutil.copy(tree / "bin/busybox", folder / "busybox")
            pack_initramfs(tree, folder / "initramfs")

    wanted = [host_release(), _MODULES, init]
    return cached("debian-kernel", wanted, build, what="Debian's kernel")


def _fill_base(tree: Path, unpacked: Path) -> None:
    """Lay out the initramfs: busybox, /init, and the modules in an order that loads."""
    (tree / "bin").mkdir(parents=True)
    busybox = next(path for path in unpacked.rglob("busybox") if path.parent.name == "bin")
    shutil.copy(busybox, tree / "bin/busybox")
    shutil.copy(_INIT, tree / "init")
    (tree / "init").chmod(0o755)
    lay_out_modules(tree / "modules", unpacked, _MODULES)


def lay_out_modules(folder: Path, unpacked: Path, names: Iterable[str]) -> None:
    """Copy modules of the kernel in `unpacked`, and those that they need, into `folder`.

    Their files' names are in an order that loads.
    """
    source = next(path for path in unpacked.glob("**/lib/modules/*") if (path / "kernel").is_dir())
    modules = {path.name.split(".ko")[0]: path for path in source.rglob("*.ko*")}
    order: list[str] = []

    def add(name: str) -> None:
        # What is built in has no file.
        if name in order or name not in modules:
            return
        for needed in module_needs(_content(modules[name])):
            # A name has a dash or an underscore, and its file the other.
            add(needed if needed in modules else needed.replace("_", "-"))
        order.append(name)

    for name in names:
        add(name)
    folder.mkdir()
    for number, name in enumerate(order):
        (folder / f"{number:03}-{name}.ko").write_bytes(_content(modules[name]))


def _content(module: Path) -> bytes:
    content = module.read_bytes()
    return lzma.decompress(content) if module.suffix == ".xz" else content


def _fill_root(root: Path, paths: Iterable[Path], names: Iterable[str]) -> None:
    """Copy this machine's Python, the programs, what they load, and the paths."""
    for place in map(Path, ("/bin", "/sbin", "/lib", "/lib64")):
        if place.is_symlink():  # to a folder of that name below usr
            (root / "usr" / place.name).mkdir(parents=True)
            (root / place.name).symlink_to(place.readlink())
    paths = list(paths)
    standard = Path(sysconfig.get_path("stdlib"))
    found = [standard, Path(sys.prefix), *(path for path in paths if path.is_dir())]
    found += [
        package
        for name in _PYTHON_PACKAGES
        for place in sys.path
        for package in Path(place).glob(f"{name}*")  # with what tells of its parts
        if package.is_dir()
    ]
    for folder in dict.fromkeys(found):
        target = root / folder.relative_to("/")
        shutil.copytree(folder, target, symlinks=True, ignore=_LEFT_OUT, dirs_exist_ok=True)
    programs = [Path(path) for name in names if (path := shutil.which(name))]
    interpreter = Path(sys.executable).resolve()
    modules = [*standard.glob("lib-dynload/*.so"), *Path(sys.prefix).rglob("*.so")]
    loaded = [*programs, interpreter, *modules]
    text = run_command(["ldd", *loaded], check=False).stdout
    libraries = {Path(path) for path in re.findall(r"(/\S+\.so\S*)(?= \()", text)}
    files = (path for path in paths if path.is_file())
    for file in (*programs, interpreter, *libraries, *files):
        target = root / file.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    link = Path(sys.executable)  # of a virtual environment, to that of the system, and on
    while link.is_symlink():
        if not (copy := root / link.relative_to("/")).is_symlink():
            copy.symlink_to(link.readlink())
        link = link.parent / link.readlink()
    for name in ("proc", "sys", "dev", "tmp", "run", "etc"):
        (root / name).mkdir(exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")


def _archive(tree: Path, busybox: Path, archive: Path) -> None:
    names = sorted(path.relative_to(tree) for path in tree.rglob("*"))
    run_command(
        [busybox, "cpio", "-o", "-H", "newc", "-F", archive],
        stdin="".join(f"{name}\n" for name in names),
        cwd=tree,
    )
