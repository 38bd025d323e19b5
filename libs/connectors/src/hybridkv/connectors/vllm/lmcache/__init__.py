"""HybridLMCacheConnector: a prefix goes to an `lmcache server` of a fleet and comes back, with nothing in between."""
