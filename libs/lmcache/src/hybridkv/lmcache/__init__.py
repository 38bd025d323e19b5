"""Client of LMCache's server: calls, checks of answers, and shared memory that the server reads and writes."""
