"""Maintenance: file work of an index, planned in its thread and run in the janitor's."""
