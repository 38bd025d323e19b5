"""HybridOffloadConnector: stores prefixes in a stack of tiers, and loads them from there."""
