"""The control calls of an engine, for HTTP, AsyncLLM and LLM alike."""
