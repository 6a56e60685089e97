"""Tests of the modules that every package uses."""
