"""HybridNixlConnector: an engine that prefills hands its KV cache to one that decodes, each group what it resumes from.

`connector` is vLLM's interface, `scheduler` the half that decides, `worker` the half that talks to peers, `params` what
travels with a request through a proxy. What is read, and whether it may be believed, is hybridkv.peers' to say.
"""
