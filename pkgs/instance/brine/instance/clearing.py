"""The name that units of Brine 0.1 run :mod:`brine.instance.service.clear` by, until systemd has reloaded them."""

from brine.instance.service.clear import main

if __name__ == "__main__":
    main()
