"""The programs that an instance's unit, and other units, run."""
