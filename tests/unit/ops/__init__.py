"""Tests of `vllm.inflight.ops`."""
