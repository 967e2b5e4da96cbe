"""How long plugging waits, in seconds, unless a command says otherwise."""

LOCK_TIMEOUT_S = 60.0
QMP_TIMEOUT_S = 15.0
UNPLUG_TIMEOUT_S = 30.0
"""How long the guest may take to release a device."""
