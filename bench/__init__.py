"""What is fast in Brine, measured beside a peer: a package for each, and here what they share."""
