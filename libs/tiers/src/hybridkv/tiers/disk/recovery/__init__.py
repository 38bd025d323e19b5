"""Recovery: reads a store at a start, and builds the tables of an index from it."""
