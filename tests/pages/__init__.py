"""Compares the names on Markdown pages with the names in the tree."""
