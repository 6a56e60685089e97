"""What is checked before a version may be committed."""
