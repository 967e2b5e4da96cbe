"""The node's network: taps, what they are connected to, and what is on record of them."""
