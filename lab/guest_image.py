"""The kernel and the initramfs that guests boot: Debian's cloud kernel and a static busybox.

Both come from Debian's packages, unpacked and not installed.
"""

from __future__ import annotations

import gzip
import lzma
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lab.cache import cached
from lab.command import run_command
from lab.debian import host_release
from lab.errors import LabError

_INIT = Path(__file__).with_name("guest-init.sh")
_KERNEL_PACKAGE = "linux-image-cloud-amd64"
_BUSYBOX_PACKAGE = "busybox-static"

# The power button for ACPI powerdown, a way to report panics, NICs, disks and a file system. A
# release's kernel may have some of them built in.
_MODULES = ["button", "evdev", "pvpanic-mmio", "pvpanic-pci"]
_MODULES += ["virtio_pci", "virtio_net", "virtio_blk", "virtio_scsi", "sd_mod", "8021q"]
# What ext4 needs without saying so comes first.
_MODULES += ["crc32c_generic", "ext4"]

# The self-tests take a tenth of the time that an emulated processor takes to boot. Another eighth
# goes into a random address for the kernel, and into its locks' change for a single processor.
KERNEL_OPTIONS = "panic=-1 quiet cryptomgr.notests nokaslr noreplace-smp"
"""Parameters for the kernel of a guest, besides the one that names its console."""


@dataclass(frozen=True)
class GuestImage:
    """Files that QEMU boots a guest from."""

    kernel: Path
    initramfs: Path

    @property
    def folder(self) -> Path:
        return self.kernel.parent


def guest_image() -> GuestImage:
    """The cached guest image, with the kernel of this machine's Debian release."""
    init = _INIT.read_text()

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            packages = Path(scratch)
            # apt downloads as a user of its own.
            packages.chmod(0o755)
            unpacked = packages / "unpacked"
            for package in (kernel_package(), _BUSYBOX_PACKAGE):
                unpack_package(package, packages, unpacked)
            shutil.copy(next(unpacked.glob("boot/vmlinuz-*")), folder / "kernel")
            tree = packages / "initramfs"
            _fill(tree, unpacked)
            pack_initramfs(tree, folder / "initramfs")

    entry = cached("guest", [host_release(), _MODULES, init], build, what="the guests' image")
    return GuestImage(entry / "kernel", entry / "initramfs")


def kernel_package() -> str:
    """The package behind the metapackage: it has the version in its name."""
    depends = run_command(["apt-cache", "depends", "--important", _KERNEL_PACKAGE]).stdout
    for line in depends.splitlines():
        kind, _, package = line.strip().partition(": ")
        if kind == "Depends" and package.startswith("linux-image-"):
            return package
    raise LabError(f"apt knows no kernel for {_KERNEL_PACKAGE}", hint="run apt-get update")


def unpack_package(package: str, scratch: Path, target: Path) -> None:
    # The sandbox user of apt could not write into a folder of the caller's.
    download = ["apt-get", "-o", "APT::Sandbox::User=", "download", "--quiet=2", package]
    run_command(download, cwd=scratch)
    archive = next(scratch.glob(f"{package}_*.deb"))
    run_command(["dpkg-deb", "--extract", archive, target])


def _fill(tree: Path, unpacked: Path) -> None:
    """Lay out the initramfs: busybox, /init, and the modules with those that they need."""
    (tree / "bin").mkdir(parents=True)
    (tree / "etc").mkdir()
    busybox = next(path for path in unpacked.rglob("busybox") if path.parent.name == "bin")
    shutil.copy(busybox, tree / "bin/busybox")
    shutil.copy(_INIT, tree / "init")
    (tree / "init").chmod(0o755)

    source = next(path for path in unpacked.glob("**/lib/modules/*") if (path / "kernel").is_dir())
    modules = {path.name.split(".ko")[0]: path for path in source.rglob("*.ko*")}
    wanted = [name for name in _MODULES if name in modules]
    (tree / "etc/modules").write_text("".join(f"{name}\n" for name in wanted))
    target = tree / "lib/modules" / source.name
    target.mkdir(parents=True)
    while wanted:
        path = modules[wanted.pop()]
        content = path.read_bytes()
        if path.suffix == ".xz":
            content = lzma.decompress(content)
        copy = target / path.name.removesuffix(".xz")
        if not copy.exists():
            copy.write_bytes(content)
            # A name has a dash or an underscore, and its file the other.
            needed = [name for needs in module_needs(content) for name in _spellings(needs)]
            wanted += [name for name in needed if name in modules]
    run_command([busybox, "depmod", "-b", tree, source.name])


def _spellings(module: str) -> set[str]:
    return {module, module.replace("_", "-")}


def module_needs(module: bytes) -> list[str]:
    """The modules that a module says it needs, in the `depends=` of its .modinfo section."""
    needs = [field for field in module.split(b"\0") if field.startswith(b"depends=")]
    return [name for name in needs[0][len(b"depends=") :].decode().split(",") if name]


def pack_initramfs(tree: Path, initramfs: Path) -> None:
    names = sorted(path.relative_to(tree) for path in tree.rglob("*"))
    busybox = tree / "bin/busybox"
    archive = tree.parent / "initramfs.cpio"
    run_command(
        [busybox, "cpio", "-o", "-H", "newc", "-F", archive],
        stdin="".join(f"{name}{os.linesep}" for name in names),
        cwd=tree,
    )
    initramfs.write_bytes(gzip.compress(archive.read_bytes()))
