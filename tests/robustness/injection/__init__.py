"""Faults at named points of an update, and what has to hold after each of them."""
