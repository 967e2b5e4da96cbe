"""The node's network: taps, their connections, and their records."""
