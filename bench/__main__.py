"""`python3 -m bench NAME ...` runs a benchmark; with `--measure`, its measuring process."""

import sys
from importlib import import_module

from bench.harness import measure, run_bench

if sys.argv[1] == "--measure":
    measure(import_module(f"bench.{sys.argv[2]}"), sys.argv[3])
else:
    run_bench(import_module(f"bench.{sys.argv.pop(1)}"))
