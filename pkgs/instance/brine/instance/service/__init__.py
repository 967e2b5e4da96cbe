"""The programs that units run."""
