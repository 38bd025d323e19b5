"""What the Markdown pages name, compared with what the tree has."""
