"""The name that units of Brine 0.1 run :mod:`brine.instance.shutdown` by, until systemd has reloaded them."""

from brine.instance.shutdown import main

if __name__ == "__main__":
    main()
