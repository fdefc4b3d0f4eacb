"""What a user asks about a run without running it."""
