"""HybridMultiConnector: several child connectors for one engine. The best child loads a request; all children store."""
