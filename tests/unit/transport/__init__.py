"""Tests of `vllm.inflight.transport`."""
