"""A node's side of moves: which node may run an instance, and its way from one to another."""
