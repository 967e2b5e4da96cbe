#!/bin/busybox sh
# The init of a guest: obeys orders that come over the serial line, one a line.
# The kernel and the lab call it /init; `guest_image.py` puts it into the initramfs.

export PATH=/bin
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null

while read -r module; do
    modprobe "$module"
done </etc/modules

exec </dev/ttyS0 >/dev/ttyS0 2>&1
stty -echo
# The kernel's own lines, but those of its end, would come between a command's.
dmesg -n 1

# Pressing the power button (QMP: system_powerdown) ends the guest as it would a server. The
# action's file is named as busybox's built-in table names that button.
mkdir -p /etc/acpi/PWRF
printf '#!/bin/sh\npoweroff -f\n' >/etc/acpi/PWRF/00000080
chmod +x /etc/acpi/PWRF/00000080
mkdir -p /run
acpid -l /dev/null -p /run/acpid.pid
# It goes into the background first and opens the button's device then; the file comes last.
while [ ! -e /run/acpid.pid ]; do
    usleep 10000
done

# Loaded, the emulated line loses a character or sends it twice, in both directions: who hears can
# tell by the digest. What is not answered is ordered again, and then told again, not done again.
heard_right() {
    [ "$1" = "$(printf %s "$2" | md5sum | cut -d ' ' -f 1)" ]
}

tell() {
    echo "guest: $mark begins"
    cat /run/output
    echo "guest: $mark ended with $status $(md5sum </run/output)"
}

obeys() {
    echo "guest: obeys $order"
}

mark=none
echo "guest: ready"
while read -r order; do
    case $order in
        poweroff | reboot)
            obeys
            $order -f
            ;;
        crash)
            obeys
            echo c >/proc/sysrq-trigger
            ;;
        hello) echo "guest: ready" ;;
        "run $mark "*) tell ;;
        # run MARK DIGEST COMMAND: the mark tells this command's output from all else on the line.
        "run "*)
            order=${order#run }
            ordered=${order%% *}
            order=${order#* }
            if heard_right "${order%% *}" "$ordered ${order#* }"; then
                mark=$ordered
                sh -c "${order#* }" </dev/null >/run/output 2>&1
                status=$?
                tell
            else
                echo "guest: misheard"
            fi
            ;;
        *) echo "guest: no such order: $order" ;;
    esac
done
