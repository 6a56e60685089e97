"""Tests of `vllm.inflight.patch`."""
