"""Tests of `vllm.inflight.engine`."""
