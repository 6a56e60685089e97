"""Where a trainer's tensors come from."""
