"""The command `hybridkv`, for operators. It reports what the libraries know, and makes no decision of an engine."""
