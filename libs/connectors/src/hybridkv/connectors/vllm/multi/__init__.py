"""Several connectors below one engine: for each request the one that is worth most loads, and all of them store."""
