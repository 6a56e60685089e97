"""Tests of vLLM in-flight."""
