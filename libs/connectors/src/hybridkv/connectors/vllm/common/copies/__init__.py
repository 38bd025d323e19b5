"""Copies between KV cache blocks and host memory: tables of copies, their lowering, devices, and the proof at start."""
