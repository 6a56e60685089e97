"""Tests of `vllm.inflight.trainer`."""
