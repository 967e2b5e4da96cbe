"""A forwarder: units of Brine 0.1 run :mod:`brine.instance.service.node_shutdown` by this name."""

from brine.instance.service.node_shutdown import main

if __name__ == "__main__":
    main()
