"""Copies between KV cache blocks and host memory: copy tables, their lowering, devices, and the proof at the start."""
