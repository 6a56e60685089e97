"""Engines, and scripts that run one in a process of its own."""
