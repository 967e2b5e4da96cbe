#!/bin/sh
# owner.sh FOLDER: an owner in ten lines, for any container. FOLDER is the instance's, such as /run/brine/lifecycle/ci1.
cd "$1" || exit 1
trap 'asked=yes; : >terminate' TERM INT
rm -f watchdog
until [ -e pid ] || [ -n "${asked-}" ]; do touch watchdog; sleep 1; done
while [ -e pid ]; do
    touch watchdog
    sleep 2 & wait $!
    [ -z "${asked-}" ] || [ -e terminate ] || break
done
rm -f watchdog
