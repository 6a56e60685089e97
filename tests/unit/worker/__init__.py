"""Tests of `vllm.inflight.worker`."""
