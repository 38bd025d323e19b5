"""Tables of an index: records, segments, and the log of changes to the records."""
