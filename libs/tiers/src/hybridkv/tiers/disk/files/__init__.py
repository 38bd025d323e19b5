"""Files of a store: their names, the lock, the namespaces and the segment files."""
