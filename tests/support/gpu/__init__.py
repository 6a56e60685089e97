"""Scripts and workers of the GPU tests."""
