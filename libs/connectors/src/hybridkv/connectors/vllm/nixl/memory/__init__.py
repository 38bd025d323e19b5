"""Memory of a worker that peers read: its description, its parts, its digests, and the host buffer of a device."""
