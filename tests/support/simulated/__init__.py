"""An engine core whose workers are simulated."""
