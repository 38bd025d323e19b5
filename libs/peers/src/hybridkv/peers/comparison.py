"""Whether two sides fit."""
