"""Which bytes move."""
