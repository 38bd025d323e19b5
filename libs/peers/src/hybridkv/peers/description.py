"""What one side says of itself."""
