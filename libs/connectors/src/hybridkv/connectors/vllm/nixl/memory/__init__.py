"""Memory of a worker that peers read: its description, its parts, its digests, and a host buffer for GPUs."""
