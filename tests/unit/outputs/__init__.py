"""Tests of `vllm.inflight.outputs`."""
