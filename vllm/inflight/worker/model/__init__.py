"""The modules that a model consists of, and which of them can be updated."""
