"""The doors: flags, HTTP routes, methods of LLM and AsyncLLM."""
