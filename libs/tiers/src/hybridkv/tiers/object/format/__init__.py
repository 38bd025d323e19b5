"""What is written to an object store, byte by byte. Pure: reads and writes no object. FORMAT.md has every field."""
