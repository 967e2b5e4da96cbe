"""The watcher: brings instances to their desired state, and restarts those that crashed."""
