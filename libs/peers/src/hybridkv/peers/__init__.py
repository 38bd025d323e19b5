"""Direct KV cache exchange between engines: compatibility, byte ranges, leases and reads."""
