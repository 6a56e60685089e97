"""Import paths of earlier releases; the code is in `vllm.inflight.transport`."""
