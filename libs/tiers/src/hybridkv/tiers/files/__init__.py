"""Directories and files that no other user can exchange, for all tiers on a file system."""
