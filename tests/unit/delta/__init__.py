"""Tests of `vllm.inflight.delta`."""
