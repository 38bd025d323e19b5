"""Byte formats of a store, and addresses of records. Opens, reads and writes no file."""
