"""HybridNixlConnector: a decode engine reads the KV cache that a prefill engine computed, over NIXL.

For each group, the decode engine reads only the blocks from which the group resumes. `connector` is vLLM's interface,
`scheduler` the half that decides, `worker` the half that exchanges data with peers, `params` the parameters that a
proxy carries with a request. `hybridkv.peers` decides which bytes are read and whether a read is correct.
"""
