"""The kinds of file work, a file each: the chore as a value, and who plans it and applies what came of it."""
