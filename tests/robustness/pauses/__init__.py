"""Pauses and commits in the middle of everything else an engine can do."""
