"""The cluster's configuration: its objects, the store that keeps them, and what is made of it."""
