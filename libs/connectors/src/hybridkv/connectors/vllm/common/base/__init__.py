"""Base classes of the connectors."""
