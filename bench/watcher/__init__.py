"""What a pass of the watcher costs, beside asking alone."""
