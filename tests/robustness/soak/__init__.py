"""Long runs: an engine under mixed load, updates and faults, and everything checked."""
