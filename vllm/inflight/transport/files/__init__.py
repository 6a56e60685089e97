"""Tensors from files of the engine's host, on disk or in shared memory."""
