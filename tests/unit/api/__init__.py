"""Tests of `vllm.inflight.api`."""
