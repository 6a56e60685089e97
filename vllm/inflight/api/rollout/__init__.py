"""SGLang's rollout routes: a request for tokens, its reply, and the engine's load."""
