"""What all tests share: cached packages, and nodes for those that need no node of their own."""
