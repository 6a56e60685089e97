"""The second set of weights and what fills it."""
