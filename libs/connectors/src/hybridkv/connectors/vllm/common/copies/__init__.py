"""Copies between KV cache blocks and host memory: copy tables, lowering, devices, and the proof at the start."""
