"""Real schedulers and cores, in front of a worker that is simulated."""
