"""Detection of writes into live weights outside of updates."""
