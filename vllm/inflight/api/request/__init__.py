"""One request: who sent it, what it says, and how often it may come."""
