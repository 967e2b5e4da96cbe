"""A forwarder: units of Brine 0.1 run :mod:`brine.instance.service.stop` by this name."""

from brine.instance.service.stop import main

if __name__ == "__main__":
    main()
