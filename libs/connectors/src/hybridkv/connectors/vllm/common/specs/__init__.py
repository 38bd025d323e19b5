"""KV cache specs of the engine: known specs, resumable specs, and specs with blocks that a chunk may cut."""
