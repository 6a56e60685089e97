"""A trainer on the engine's host shares its GPU memory with the workers."""
