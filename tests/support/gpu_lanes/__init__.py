"""Tests on GPUs and benchmarks side by side, on a host that is rented by the minute."""
