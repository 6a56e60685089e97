"""Out-of-band writes and scrubs, as the engine core sees them."""
