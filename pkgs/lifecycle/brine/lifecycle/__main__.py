"""``python3 -m brine.lifecycle``, for a trial from the source tree."""

import sys

from brine.lifecycle.main import main

sys.exit(main())
