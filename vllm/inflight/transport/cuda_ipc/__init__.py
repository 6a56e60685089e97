"""A trainer on the engine's host lends its GPU memory to the workers."""
