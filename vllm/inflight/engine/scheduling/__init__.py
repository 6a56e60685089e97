"""What the scheduler gains: versions of steps, caches and requests."""
