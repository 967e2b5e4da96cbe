"""The disks of instances whose volumes Brine makes."""
