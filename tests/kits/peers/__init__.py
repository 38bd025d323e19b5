"""Test kit for peers: suites for transports, an in-memory one, a peer as a process, faults, a reference, a fuzzer."""
