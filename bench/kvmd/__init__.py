"""brine-kvmd beside Ganeti's daemon of the same purpose, on scripted QMP sockets."""
