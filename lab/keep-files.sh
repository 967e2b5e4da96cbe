#!/bin/bash
# Runs a node that has after a reboot what it had before: TREE FOLDER NSPAWN...
# The node's root is FOLDER/root. What it writes is in a file system of this process's mount
# namespace (unshare), and ends with it.
set -euo pipefail

tree=$1 folder=$2
shift 2
mkdir "$folder/kept" "$folder/root"
mount -t tmpfs -o mode=0755 kept "$folder/kept"
mkdir "$folder/kept/upper" "$folder/kept/work"
layers=lowerdir=$tree,upperdir=$folder/kept/upper,workdir=$folder/kept/work
mount -t overlay -o "$layers" root "$folder/root"

trap 'kill -TERM "$nspawn"' TERM
status=133
# nspawn ends with that when the node reboots, and with --keep-unit leaves it to others to start it.
# A node that loses its power has the file FOLDER/reset.
while [ "$status" = 133 ] || [ -e "$folder/reset" ]; do
    rm -f "$folder/reset"
    "$@" &
    nspawn=$! status=0
    wait "$nspawn" || status=$?
done
