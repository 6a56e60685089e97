"""The shadow model: how it is built, and how it is flipped with the live model."""
