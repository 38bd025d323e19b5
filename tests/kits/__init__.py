"""Shared test kits, with plain-Python models that native code is compared with."""
