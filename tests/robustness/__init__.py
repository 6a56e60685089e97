"""Faults, injected and replayed; hostile input; long runs."""
