"""The repository: pages, packaging, structure."""
