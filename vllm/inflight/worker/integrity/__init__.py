"""Whether live weights are still those that were committed."""
