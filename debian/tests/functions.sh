# shellcheck shell=sh
# What the tests share. Each ends at its first error.

set -eu

# within SECONDS COMMAND..: wait until a command succeeds.
within() {
    deadline=$(($(date +%s) + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        if [ "$(date +%s)" -ge "$deadline" ]; then
            echo "still not so: $*" >&2
            "$@"
            exit 1
        fi
        sleep 0.2
    done
}

# define NAME [KEYS]: define an instance, which has no guest and takes no processor.
define() {
    echo "{\"name\": \"$1\", \"accel\": \"tcg\", \"memory_mib\": 64, \"extra_arguments\": [\"-S\"], \"shutdown_timeout\": 1${2:+, $2}}" |
        brine instance define -
}

# main_process NAME: the process id of an instance's QEMU.
main_process() {
    systemctl show --property=MainPID --value "brine-instance@$1.service"
}

# verdict NAME VERDICT: whether the last verdict on an instance is this one.
verdict() {
    brine kvmd verdicts "$1" | tail -n 1 | grep -w "$2"
}

# watched NAME: whether the KVM daemon watches an instance, or has. So no other test has its name.
watched() {
    journalctl --quiet --output=cat BRINE_EVENT=watching "BRINE_INSTANCE=$1" | grep .
}
