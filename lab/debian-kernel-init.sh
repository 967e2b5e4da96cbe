#!/bin/busybox sh
# The init of Debian's kernel in `debian_kernel.py`: runs the one script that the lab hands over, in
# the copy of the host's tree that is below /tree.

export PATH=/bin
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
for module in /modules/*; do
    insmod "$module"
done
exec </dev/null >/dev/ttyS0 2>&1
# The kernel's own lines, but those of its end, would come between the script's.
dmesg -n 1
# A root that is a mount can have its mounts changed for some processes.
mount -o bind /tree /tree
for folder in dev proc sys; do
    mount -o bind "/$folder" "/tree/$folder"
done
chmod 0666 /dev/net/tun
[ -e /dev/stdin ] || ln -s /proc/self/fd/0 /dev/stdin # which nft reads
ip link set lo up

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/ LANG=C.UTF-8
{
    chroot /tree /bin/sh /lab-script
    echo $? >/status
} | tee /said
# The emulated line may lose characters; a disk does not.
{
    echo "lab: status $(cat /status), $(wc -c </said) bytes"
    cat /said
} >/dev/vda
sync
exec /bin/busybox poweroff -f
