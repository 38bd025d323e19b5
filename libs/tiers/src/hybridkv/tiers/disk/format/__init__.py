"""The bytes of a store and where they lie. Pure arithmetic: nothing here opens, reads or writes a file."""
