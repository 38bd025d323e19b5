"""Byte formats of an object store: encoders and decoders without I/O. FORMAT.md lists every field."""
