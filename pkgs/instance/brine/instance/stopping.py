"""A forwarder: units of Brine 0.1 run :mod:`brine.instance.shutdown` by this name."""

from brine.instance.shutdown import main

if __name__ == "__main__":
    main()
