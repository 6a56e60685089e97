"""Deltas on the trainer's side: what is kept of a version, and what has changed."""
