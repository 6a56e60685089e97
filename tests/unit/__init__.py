"""Tests without an engine, by the package they test."""
