"""The life of one read."""
