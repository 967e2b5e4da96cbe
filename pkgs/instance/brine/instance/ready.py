"""A forwarder: units of Brine 0.1 run :mod:`brine.instance.service.ready` by this name."""

from brine.instance.service.ready import main

if __name__ == "__main__":
    main()
