"""What an index knows of its records and segments, in memory. Touches no file."""
