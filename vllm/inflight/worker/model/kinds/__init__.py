"""Kinds of models and layers that are updated in a way of their own."""
