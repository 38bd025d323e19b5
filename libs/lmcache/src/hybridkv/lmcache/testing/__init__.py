"""For tests: a real server as a process, and one that says whatever a test wants."""
