"""KV cache specs of the engine: which are known, which may be resumed, and which a chunk may cut."""
