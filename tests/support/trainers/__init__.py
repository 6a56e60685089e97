"""Trainers and the engines that they meet in unit tests."""
