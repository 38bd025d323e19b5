"""Client of LMCache's server: calls, checks of its answers, and the shared memory that it reads and writes."""
