"""Both ends of a transport, for unit tests."""
