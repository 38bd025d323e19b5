"""The file work of an index: what is due, on which thread it runs, and what came of it."""
