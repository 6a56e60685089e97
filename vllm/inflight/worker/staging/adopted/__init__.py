"""What a method of a worker extension may load and write while it is adopted."""
