"""The command vllm-inflight."""
