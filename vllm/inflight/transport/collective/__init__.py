"""A trainer broadcasts to all workers, over NCCL or gloo."""
