"""The cluster's configuration: its objects, its file, and ssconf."""
