"""Pause modes, leases and sleep."""
