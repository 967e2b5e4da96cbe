"""The watcher: follows the users' will, cleans up after it, and restarts what crashed."""
