"""Speaks with LMCache's server: what it is asked, what may be believed, and the memory that it reads and writes."""
