#!/bin/busybox sh
# The init of a small Xen domain: obeys orders that come over its console, one a line; see
# `xen_domain.py`.

export PATH=/bin:/sbin
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev /sbin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
# What the kernel runs when it is told to by `xl shutdown` or `xl reboot`; see orderly_poweroff()
# and orderly_reboot(), kernel/reboot.c.
for order in poweroff reboot; do
    printf '#!/bin/sh\nexec /bin/%s -f\n' $order >/sbin/$order
    chmod +x /sbin/$order
done

exec </dev/hvc0 >/dev/hvc0 2>&1
stty -echo
dmesg -n 1
echo "domain: ready"
while read -r order; do
    case $order in
        poweroff) poweroff -f ;;
        reboot) reboot -f ;;
        crash) echo c >/proc/sysrq-trigger ;;
        hello) echo "domain: ready" ;;
        # From now on it only says that it will end.
        deaf)
            printf '#!/bin/sh\n' >/sbin/poweroff
            printf '#!/bin/sh\n' >/sbin/reboot
            echo "domain: deaf"
            ;;
        # So that it is seen as running, not as waiting.
        busy) while :; do :; done & ;;
        *) echo "domain: no such order: $order" ;;
    esac
done
