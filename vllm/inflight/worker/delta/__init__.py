"""Applying deltas on a rank."""
