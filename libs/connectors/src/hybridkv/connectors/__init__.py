"""Connectors of inference engines. They translate between an engine and hybridkv, and decide nothing themselves."""
