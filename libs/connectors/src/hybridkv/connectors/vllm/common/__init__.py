"""What all connectors share: reading of the engine, its requests, counts, copies and the identity of stored bytes."""
