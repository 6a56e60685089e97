"""The memory of live and shadow weights."""
