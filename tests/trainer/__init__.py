"""Tests of the trainer's side, without an engine."""
