"""Directories and files that no other user can exchange: the file work that all tiers on a file system share."""
