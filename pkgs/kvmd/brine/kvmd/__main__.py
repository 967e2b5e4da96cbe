"""``python3 -m brine.kvmd``, for a trial from the source tree."""

import sys

from brine.kvmd.main import main

sys.exit(main())
