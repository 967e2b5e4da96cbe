#!/bin/sh
# systemd-update-helper ACTION [UNIT..]: what Fedora's packages and file triggers ask systemd for, by
# that name, while rpm installs, upgrades or removes packages. It never fails.
action=$1
shift

case $action in
    install-system-units)
        systemctl --no-reload preset "$@"
        ;;
    remove-system-units)
        if [ -d /run/systemd/system ]; then
            systemctl --no-reload disable --now --no-warn "$@"
        else
            systemctl --no-reload disable --no-warn "$@"
        fi
        ;;
    mark-restart-system-units)
        [ ! -d /run/systemd/system ] ||
            for unit; do
                systemctl set-property "$unit" Markers=+needs-restart
            done
        ;;
    system-reload)
        [ ! -d /run/systemd/system ] || systemctl daemon-reload
        ;;
    system-restart)
        [ ! -d /run/systemd/system ] || systemctl reload-or-restart --marked
        ;;
    system-reload-restart)
        [ ! -d /run/systemd/system ] || { systemctl daemon-reload && systemctl reload-or-restart --marked; }
        ;;
    *)
        echo "systemd-update-helper: no such action: $action" >&2
        ;;
esac
exit 0
