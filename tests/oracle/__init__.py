"""Byte-exact model of the engine: real vLLM scheduling, a fake model runner, and every byte checked. See engine.py."""
