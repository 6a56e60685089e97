"""Tests on a real engine core whose workers are simulated."""
