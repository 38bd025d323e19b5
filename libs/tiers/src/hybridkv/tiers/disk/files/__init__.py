"""Files of a store: locks, namespaces and segment files."""
