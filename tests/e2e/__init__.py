"""Tests on a real vLLM engine on CPU."""
