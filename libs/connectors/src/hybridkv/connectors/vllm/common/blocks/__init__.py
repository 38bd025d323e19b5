"""Blocks of the engine: block tables, pins, corrupt blocks, and blocks that loads reserve."""
