"""The programs that units run.

Each loads a hundred modules and ends, or becomes QEMU. So garbage is looked for rarely, as in
:mod:`brine.common.main`.
"""

import gc

from brine.common import ALLOCATIONS

gc.set_threshold(ALLOCATIONS)
