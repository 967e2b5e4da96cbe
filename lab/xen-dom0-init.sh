#!/bin/busybox sh
# The init of a Xen node's initramfs: loads what its disk and its network need, and hands over to
# the systemd on that disk. `xen_image.py` puts it there.

export PATH=/bin
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev /disk
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*; do
    insmod "$module"
done
# The address that QEMU's user network forwards connections to.
ip link set lo up
ip link set eth0 up
ip address add 10.0.2.15/24 dev eth0
mount -t ext4 /dev/vda /disk
mount -o move /dev /disk/dev
umount /proc /sys
exec switch_root /disk /sbin/init
