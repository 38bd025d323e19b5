"""HybridLMCacheConnector: stores and loads prefixes directly at an `lmcache server`."""
