"""Test kit for LMCache: a real server as a process, and a scripted server."""
