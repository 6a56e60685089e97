"""How the releases of vLLM differ."""
