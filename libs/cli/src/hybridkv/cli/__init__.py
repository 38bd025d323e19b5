"""The command `hybridkv`, for operators. It shows the results of the libraries and decides nothing for an engine."""
