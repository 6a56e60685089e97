"""One request: its caller, its fields, and its rate limit."""
