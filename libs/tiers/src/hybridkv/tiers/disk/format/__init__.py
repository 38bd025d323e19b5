"""Bytes of a store and their addresses. Pure arithmetic: opens, reads and writes no file."""
