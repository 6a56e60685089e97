"""Routes that clients of other frameworks call."""
