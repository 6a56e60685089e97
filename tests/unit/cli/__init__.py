"""Tests of `vllm.inflight.cli`."""
