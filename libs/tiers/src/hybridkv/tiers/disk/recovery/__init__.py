"""Recovery: what an index finds on disk when it starts, and the tables that it builds from that."""
