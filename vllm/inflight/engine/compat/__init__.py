"""Calls of other frameworks and of vLLM's worker interface."""
