"""The cached disk that Xen nodes boot from, and the files that Xen is started with.

The disk is never written to: nodes write to a copy, or to what QEMU keeps beside it.
"""

from __future__ import annotations

import gzip
import hashlib
import inspect
import secrets
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lab import images
from lab.cache import cached
from lab.command import run_command
from lab.debian import known_release
from lab.debian_kernel import lay_out_modules
from lab.guest_image import guest_image, pack_initramfs
from lab.machine import require_commands, require_root

XEN_OF_RELEASE = {"bookworm": "4.17", "trixie": "4.20"}

DOMAIN_FOLDER = Path("/srv/domain")
"""Where a node has `kernel` and `initramfs` for domains."""

DOMAIN_LOGS = Path("/var/log/xen/console")
"""Where a node has what domains have said, in `guest-NAME.log`."""

_DISK_SIZE = "3G"  # sparse
_AGENT = Path(__file__).with_name("xen_agent.py")
_AGENT_INSIDE = Path("/usr/local/lib/brine-lab")
_DOM0_INIT = Path(__file__).with_name("xen-dom0-init.sh")
_DOMAIN_INIT = Path(__file__).with_name("xen-domain-init.sh")

# What crc32 needs without saying so comes first.
_DOM0_MODULES = ["crc32c_generic", "virtio_pci", "virtio_blk", "virtio_net", "ext4"]

# With what Brine's packages depend on, so that a node can install them, and what it keeps disks on
# and copies them with. The same disk is booted without Xen, for guests of QEMU's.
_PACKAGES = [
    *("systemd", "systemd-sysv", "dbus", "linux-image-amd64", "busybox-static"),
    *("iproute2", "nftables", "procps", "bash-completion"),
    *("python3", "python3-json-pointer", "python3-pyinotify", "python3-pyroute2"),
    *("python3-systemd", "kmod", "lvm2", "qemu-system-x86", "qemu-utils"),
]

# Under emulation each unit takes a second or more: what a throw-away dom0 has no use for is left
# out. xendomains would start and save domains of its own accord.
_MASKED_UNITS = [
    *("systemd-logind.service", "systemd-user-sessions.service", "serial-getty@hvc0.service"),
    *("systemd-udev-trigger.service", "systemd-hwdb-update.service", "ldconfig.service"),
    *("systemd-journal-catalog-update.service", "systemd-update-done.service"),
    *("systemd-tpm2-setup.service", "systemd-tpm2-setup-early.service"),
    *("systemd-pcrmachine.service", "kmod-static-nodes.service", "modprobe@.service"),
    *("dev-hugepages.mount", "dev-mqueue.mount", "sys-kernel-debug.mount"),
    *("sys-kernel-tracing.mount", "sys-kernel-config.mount", "sys-fs-fuse-connections.mount"),
    *("systemd-random-seed.service", "systemd-machine-id-commit.service"),
    *("proc-sys-fs-binfmt_misc.automount", "systemd-binfmt.service", "systemd-sysctl.service"),
    *("systemd-remount-fs.service", "systemd-pstore.service", "systemd-rfkill.socket"),
    *("systemd-ask-password-wall.path", "systemd-ask-password-console.path"),
    *("systemd-initctl.socket", "systemd-hostnamed.socket", "systemd-journald-audit.socket"),
    *("systemd-creds.socket", "systemd-pcrextend.socket", "systemd-pcrlock.socket"),
    *("e2scrub_all.timer", "e2scrub_reap.service", "hwclock.service", "xendomains.service"),
]
# The one that makes Xen's unit of its init script.
_KEPT_GENERATOR = "systemd-sysv-generator"

# Nothing is too slow here.
_SYSTEM_CONF = """[Manager]
DefaultTimeoutStartSec=15min
DefaultTimeoutStopSec=15min
DefaultDeviceTimeoutSec=15min
"""

_AGENT_UNIT = f"""[Unit]
Description=The lab's agent

[Service]
ExecStart=/usr/bin/python3 {_AGENT_INSIDE}/xen_agent.py {_AGENT_INSIDE}/token
Environment=HOME=/root LANG=C.UTF-8
# What a command has left running is not the agent's.
KillMode=process

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class XenImage:
    """The folder with all that QEMU boots a Xen node from; `token` is what its agent believes."""

    folder: Path

    @property
    def hypervisor(self) -> Path:
        return self.folder / "xen"

    @property
    def kernel(self) -> Path:
        return self.folder / "kernel"

    @property
    def initramfs(self) -> Path:
        return self.folder / "initramfs"

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    @property
    def token(self) -> str:
        return (self.folder / "token").read_text()


def xen_image(release: str) -> XenImage:
    """The image of a Debian release: its Xen, its kernel as dom0, and a kernel for domains."""
    release = known_release(release)
    require_root("a Xen node's disk")
    require_commands("a Xen node's disk", ["mmdebstrap", "mkfs.ext4"])
    guest = guest_image()

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="brine-xen-") as scratch:
            Path(scratch).chmod(0o755)
            tree = Path(scratch) / "tree"
            xen = XEN_OF_RELEASE[release]
            packages = [*_PACKAGES, f"xen-utils-{xen}", f"xen-hypervisor-{xen}-amd64"]
            images._debootstrap(release, tree, packages)
            hypervisor = next(tree.glob("boot/xen-*.gz"))
            (folder / "xen").write_bytes(gzip.decompress(hypervisor.read_bytes()))
            shutil.copy(next(tree.glob("boot/vmlinuz-*")), folder / "kernel")
            _pack(_DOM0_INIT, tree, folder / "initramfs", _DOM0_MODULES)
            inside = tree / DOMAIN_FOLDER.relative_to("/")
            inside.mkdir(parents=True)
            shutil.copy(guest.kernel, inside)
            _pack(_DOMAIN_INIT, tree, inside / "initramfs")
            for started in tree.glob("boot/*"):
                started.unlink()  # QEMU starts them
            token = folder / "token"
            token.touch(mode=0o600)
            token.write_text(secrets.token_hex())
            _set_up(tree, token)
            _make_disk(tree, folder / "disk")

    kernel = hashlib.sha256(guest.kernel.read_bytes()).hexdigest()
    ingredients = [release, kernel, *_sources()]
    return XenImage(cached(f"xen-{release}", ingredients, build, what=f"a Xen disk, {release}"))


def _sources() -> list[str]:
    """What the image is made by and of: when it changes, images are made anew."""
    modules = [inspect.getsource(sys.modules[__name__]), inspect.getsource(images)]
    return [*modules, *(path.read_text() for path in (_AGENT, _DOM0_INIT, _DOMAIN_INIT))]


def _pack(init: Path, tree: Path, initramfs: Path, modules: list[str] | None = None) -> None:
    """Make an initramfs of busybox, an init, and modules of the kernel in `tree`."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        (root / "bin").mkdir(parents=True)
        shutil.copy(tree / "usr/bin/busybox", root / "bin/busybox")
        shutil.copy(init, root / "init")
        (root / "init").chmod(0o755)
        if modules:
            lay_out_modules(root / "modules", tree, modules)
        pack_initramfs(root, initramfs)


def _set_up(tree: Path, token: Path) -> None:
    """Give the tree the agent, and take from it what only costs time."""
    system = tree / "etc/systemd/system"
    generators = tree / "etc/systemd/system-generators"
    generators.mkdir(exist_ok=True)
    masked = [system / unit for unit in _MASKED_UNITS]
    for generator in (tree / "usr/lib/systemd/system-generators").iterdir():
        if generator.name != _KEPT_GENERATOR:
            masked.append(generators / generator.name)
    for path in masked:
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/null")
    conf = tree / "etc/systemd/system.conf.d"
    conf.mkdir(exist_ok=True)
    (conf / "lab.conf").write_text(_SYSTEM_CONF)
    # A log of each domain's console.
    (tree / DOMAIN_LOGS.relative_to("/")).mkdir(parents=True)
    with (tree / "etc/default/xen").open("a") as defaults:
        defaults.write('XENCONSOLED_ARGS="--log=guest"\n')
    agent = tree / _AGENT_INSIDE.relative_to("/")
    agent.mkdir(parents=True)
    shutil.copy(_AGENT, agent)
    shutil.copy(token, agent)
    (system / "brine-lab-agent.service").write_text(_AGENT_UNIT)
    wants = system / "multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "brine-lab-agent.service").symlink_to("../brine-lab-agent.service")


def _make_disk(tree: Path, disk: Path) -> None:
    with disk.open("wb"):
        pass
    run_command(["truncate", f"--size={_DISK_SIZE}", disk])
    # Who loses a node's power makes a new one: it needs no journal.
    options = ["-q", "-O", "^has_journal,^metadata_csum"]
    run_command(["mkfs.ext4", *options, "-d", tree, disk])
