"""Agent thread of a worker: connections to peers, leases, reads."""
