"""The updates of an engine: their phases, the ranks, commit and rollback."""
