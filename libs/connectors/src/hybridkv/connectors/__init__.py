"""Engine connectors: translation between an engine's world and ours, and no decisions."""
