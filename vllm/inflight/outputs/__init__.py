"""Version truth: stamps, spans, and how they reach every reply."""
