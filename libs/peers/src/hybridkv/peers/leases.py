"""How long blocks may be read."""
