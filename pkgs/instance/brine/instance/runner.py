"""The name that units of Brine 0.1 run :mod:`brine.instance.service.run` by, until systemd has reloaded them."""

from brine.instance.service.run import main

if __name__ == "__main__":
    main()
