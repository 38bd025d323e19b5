"""Which bytes are checked."""
