"""What an index finds on disk when it starts, and the tables that it makes of that."""
