"""Engines that hand each other KV cache directly: what fits, which bytes move, how long they may be read."""
