"""Buffers of one size that tensors travel in: how they are filled, sent and read."""
