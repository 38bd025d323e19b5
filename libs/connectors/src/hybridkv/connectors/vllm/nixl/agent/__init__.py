"""Thread of a worker that talks with its peers: connections, leases, reads."""
