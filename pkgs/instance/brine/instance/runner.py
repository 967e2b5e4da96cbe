"""A forwarder: units of Brine 0.1 run :mod:`brine.instance.service.run` by this name."""

from brine.instance.service.run import main

if __name__ == "__main__":
    main()
