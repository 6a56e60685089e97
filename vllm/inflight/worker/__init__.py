"""The shadow weights of one rank, and the code that loads, checks and flips them."""
