"""Test kit for peers: transport suites, an in-memory transport, a peer as a process, faults, a reference, a fuzzer."""
