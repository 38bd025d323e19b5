"""KV cache specs of the engine: known specs, specs that can be resumed, and specs with blocks that a chunk may cut."""
