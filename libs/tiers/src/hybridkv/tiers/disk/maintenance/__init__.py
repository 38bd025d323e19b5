"""Maintenance: file work of an index, planned in the index's thread and run in the janitor's thread."""
