"""``python3 -m brine.confd``, for a trial from the source tree."""

import sys

from brine.confd.main import main

sys.exit(main())
