"""brine-confd beside Ganeti's confd."""
