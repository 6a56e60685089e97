"""Buckets, in which tensors travel: planned, filled, sent, received, put together."""
