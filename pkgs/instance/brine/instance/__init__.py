"""Virtual machines under systemd: a spec, a unit and a state for each."""
