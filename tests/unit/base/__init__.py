"""The vocabulary and the helpers below every package."""
