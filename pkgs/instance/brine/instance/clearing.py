"""A forwarder: units of Brine 0.1 run :mod:`brine.instance.service.clear` by this name."""

from brine.instance.service.clear import main

if __name__ == "__main__":
    main()
