"""Code that all connectors share: vLLM's features, requests, metrics, copies, and the identity of stored bytes."""
