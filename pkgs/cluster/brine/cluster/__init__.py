"""What several nodes do together."""
