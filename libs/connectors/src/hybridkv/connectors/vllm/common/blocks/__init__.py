"""Blocks of the engine: their tables and pins, corrupt ones, and those that loads reserve."""
